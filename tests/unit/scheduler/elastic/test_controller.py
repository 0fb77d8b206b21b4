"""The controller between two rounds, on the gcs's own rules: what it orders, and what it remembers."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.elastic import generations as gen
from stoker_scheduler.elastic import controller as module
from stoker_scheduler.elastic.controller import ElasticController
from tests.unit.scheduler.core_driver import Core
from tests.unit.scheduler.elastic.generations_world import World

if TYPE_CHECKING:
    import pytest

    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_wire.messages.elastic import ElasticState


class Gcs:
    """Withdraws places of jobs of a world, and knows nothing else."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def call(self, method: str, path: str, body: Any, **_: Any) -> ElasticState:
        job_id, what = path.split("/")[-2:]
        assert (method, what) == ("POST", "withdraw")
        self.world._withdraw(job_id, body)
        return self.world.state(job_id)


def controlled(
    world: World, targets: dict[str, Allocation], monkeypatch: pytest.MonkeyPatch
) -> ElasticController:
    """Return a controller of a world, whose rounds decide what ``targets`` are then."""
    engine: Any = SimpleNamespace(
        elastic=world.directory,
        state=Core({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 3}).state,
        jobs=SimpleNamespace(get=lambda _: None),
        now=lambda: 100.0,
    )

    async def plan_round(*_: Any) -> Any:
        return SimpleNamespace(targets=dict(targets), pools=())

    monkeypatch.setattr(module, "plan_round", plan_round)
    gcs: Any = Gcs(world)
    return ElasticController(gcs, engine=engine, interval_s=60.0, least_s=10.0)


def having(sizes: dict[str, int], allocation: Allocation, **hints: Any) -> World:
    """Return a world whose job has an allocation, and says something of itself."""
    world = World(Random(1), sizes)
    world.join("job_1")
    world.targets = {"job_1": allocation}
    while world.allocation("job_1") != dict(allocation):
        world.tick()
    world.hint("job_1", **hints)
    return world


async def test_a_place_that_is_taken_back_is_not_reserved_again_before_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = having({"n_1": 3, "n_2": 3}, (("n_1", 2), ("n_2", 1)), spares=1)
    controller = controlled(world, {"job_1": (("n_1", 2),)}, monkeypatch)
    assert not await controller.look(0.0), "the place that is lent stays"
    world.hint("job_1", unwanted=world.state("job_1").replicas[:1])
    (taken,) = controller.orders()
    assert isinstance(taken, gen.TakeBack)
    assert await controller.step()
    assert world.allocation("job_1") == {"n_1": 1, "n_2": 1}
    assert [type(order) for order in controller.orders()] == [gen.Release]
    assert world.directory.returned("job_1", 100.0) == {"n_1"}
    assert not world.directory.returned("job_1", 2000.0), "after half an hour it is any node again"


async def test_a_job_that_asks_for_a_place_more_shrinks_when_a_round_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = having({"n_1": 3, "n_2": 2}, (("n_1", 3), ("n_2", 2)), spares=1)
    targets: dict[str, Allocation] = {"job_1": (("n_1", 3), ("n_2", 2))}
    controller = controlled(world, targets, monkeypatch)
    monkeypatch.setattr(controller, "step", _nothing)
    await controller.look(0.0)
    targets["job_1"] = (("n_1", 2), ("n_2", 2))
    await controller.look(60.0)
    (order,) = controller.orders()
    assert isinstance(order, gen.Offer) and len(order.places) == 4


async def _nothing() -> bool:
    return False
