"""Parts of GPUs by their memory in the state machine: placed, counted, explained, adopted."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError
from tests.unit.scheduler.core_driver import Core, of

GIB = 1 << 30


def node(node_id: str, *sizes: int) -> ev.NodeJoined:
    resources = {"CPU": 8.0, "GPU": float(len(sizes))}
    memory = {index: size * GIB for index, size in enumerate(sizes)}
    spec = make_node_spec(node_id, resources, device_indices=tuple(memory), device_memory=memory)
    return ev.NodeJoined(at_s=0.0, spec=spec)


def shares(core: Core, request_id: str) -> list[tuple[str, dict[int, int]]]:
    granted = [core.state.leases[lease_id] for lease_id in core.granted(request_id) or ()]
    return [(lease.node_id, lease.gpus) for lease in granted]


def ask(core: Core, gib: float, **options: Any) -> str:
    return core.ask(gpu_memory=gib * GIB, **options)


def test_parts_are_counted_on_their_gpu_and_given_back() -> None:
    core = Core()
    core.feed(node("n_1", 16, 80))
    assert shares(core, ask(core, 12)) == [("n_1", {0: 7500})]
    assert shares(core, ask(core, 12)) == [("n_1", {1: 1500})]
    assert shares(core, core.ask(GPU=0.25)) == [("n_1", {0: 2500})]
    (usage,) = core.state.usage.values()
    assert usage == {"GPU": 7500 + 1500 + 2500}
    assert core.granted(ask(core, 70)) is None
    core.release(*core.state.leases)
    (last,) = core.state.leases.values()
    assert last.gpus == {1: 8750}, "what waited has room now"


def test_gangs_and_bundles_take_parts_too() -> None:
    core = Core()
    core.feed(node("n_1", 16, 16))
    core.group("STRICT_PACK", *[{"gpu_memory": 6 * GIB}] * 4)
    assert core.held() == dict.fromkeys(range(4), "n_1")
    inside = make_requirements({"gpu_memory": 6 * GIB}, group_id="pg_1", bundle=2)
    assert core.granted(core.ask(requirements=inside))
    assert core.granted(core.ask(requirements=inside)) is None, "the bundle is in use"


def test_what_no_gpu_can_serve_says_so_in_gib() -> None:
    core = Core()
    core.feed(node("n_1", 16))
    core.feed(ev.NodeJoined(at_s=0.0, spec=make_node_spec("n_2", {"GPU": 1})))
    ask(core, 20)
    core.wait(3)
    (refused,) = of(cmd.Reject, core.out)
    assert (
        "needs 20 GiB gpu_memory, the node has at most 16 GiB gpu_memory on one device"
        in refused.text
    )
    assert "the node has GPUs whose memory is not known" in refused.text


def test_a_limit_in_gpus_holds_parts_as_those_of_the_smallest_gpu() -> None:
    core = Core()
    core.feed(node("n_1", 16, 80))
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(QueueSpec(name="q", limit={"GPU": UNIT // 2}),)))
    assert core.granted(ask(core, 8, queue="q"))
    assert core.granted(ask(core, 8, queue="q")) is None
    assert not of(cmd.Reject, core.out), "it may start when the first has ended"


def test_a_new_leader_adopts_parts() -> None:
    first = Core()
    first.feed(node("n_1", 16))
    ask(first, 12)
    (lease,) = first.state.leases.values()
    second = Core()
    second.feed(node("n_1", 16))
    adopted = ev.LeaseAdopted(
        at_s=0.0,
        lease_id=lease.lease_id,
        owner_id=lease.owner_id,
        job_id=lease.job_id,
        kind=lease.kind,
        node_id=lease.node_id,
        incarnation=lease.incarnation,
        requirements=lease.requirements,
        gpus=lease.gpus,
    )
    second.feed(adopted)
    assert lease.lease_id in second.state.leases
    assert second.granted(ask(second, 5, request_id="r_9")) is None


def test_whole_gpus_and_memory_are_not_asked_for_together() -> None:
    with pytest.raises(InvalidDemandError, match="not both"):
        make_requirements({"GPU": 1, "gpu_memory": GIB})
