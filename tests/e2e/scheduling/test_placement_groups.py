"""Placement groups on a running node: reserved as a whole, used, waited for, removed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import PlacementGroupSchedulingStrategy, exceptions
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.control import Page, QueueEntry
from tests.e2e._cluster import caught, embedded, environment, head, run_driver, until_state
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 40.0
CPUS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", "0.3")
        with embedded(tmp_path_factory.mktemp("g"), num_cpus=CPUS, num_gpus=2) as info:
            yield info


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[stoker.PlacementGroup]:
    """Two bundles of one CPU, or those that the test is parametrized with."""
    bundles = getattr(request, "param", [{"CPU": 1}, {"CPU": 1}])
    made = stoker.placement_group(bundles)
    assert made.wait(WAIT_S)
    yield made
    stoker.remove_placement_group(made)
    until(lambda: free("CPU") == CPUS, WAIT_S, "all CPUs are free again")


def get(refs: Any, timeout: float = WAIT_S) -> Any:
    return stoker.get(refs, timeout=timeout)


def free(name: str) -> float:
    return stoker.available_resources().get(name, 0.0)


def within(group: stoker.PlacementGroup, index: int = -1, **more: Any) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index, **more)}


def record(group: stoker.PlacementGroup) -> dict[str, Any]:
    return stoker.placement_group_table(group)


@stoker.remote
def here() -> str | None:
    current = stoker.get_current_placement_group()
    return current.id if current is not None else None


@stoker.remote
def child_is_in(**options: Any) -> tuple[str | None, str | None]:
    return stoker.get(here.remote()), stoker.get(here.options(**options).remote())


@stoker.remote
def gpus() -> list[int]:
    return stoker.get_gpu_ids()


@stoker.remote
class Member:
    def group(self) -> str | None:
        current = stoker.get_current_placement_group()
        return current.id if current is not None else None

    def group_of_child(self) -> str | None:
        inside: str | None = stoker.get(here.options(num_cpus=0).remote())
        return inside


def test_a_group_holds_its_resources_whether_or_not_they_are_used(
    group: stoker.PlacementGroup,
) -> None:
    assert free("CPU") == CPUS - 2
    assert get([here.options(**within(group, i % 2)).remote() for i in range(4)]) == [group.id] * 4
    assert free("CPU") == CPUS - 2
    assert get(here.remote()) is None
    assert stoker.get_current_placement_group() is None
    assert get(group.ready()) == group


def test_actors_live_in_bundles_and_leave_room_when_they_end(group: stoker.PlacementGroup) -> None:
    actor = Member.options(num_cpus=1, **within(group, 0)).remote()
    assert get(actor.group.remote()) == group.id
    assert get(here.options(**within(group)).remote()) == group.id, "it is in the other bundle"
    waits = here.options(**within(group, 0)).remote()
    assert stoker.wait([waits], timeout=0.5)[0] == []
    stoker.kill(actor)
    assert get(waits) == group.id


@pytest.mark.parametrize("group", [[{"GPU": 1}, {"GPU": 0.5}]], indirect=True)
def test_bundles_have_devices_of_their_own(group: stoker.PlacementGroup) -> None:
    options = {"num_cpus": 0}
    (whole,) = get(gpus.options(num_gpus=1, **options, **within(group, 0)).remote())
    (half,) = get(gpus.options(num_gpus=0.5, **options, **within(group, 1)).remote())
    (outside,) = get(gpus.options(num_gpus=0.5, **options).remote())
    assert {whole, half} == {0, 1} and outside == half


def test_what_captured_work_starts_is_in_the_group_unless_it_says_otherwise(
    group: stoker.PlacementGroup,
) -> None:
    captured = within(group, placement_group_capture_child_tasks=True)
    options = {"num_cpus": 0, "scheduling_strategy": "DEFAULT"}
    assert get(child_is_in.options(**captured).remote(**options)) == (group.id, None)
    free_children = child_is_in.options(num_cpus=0, **within(group)).remote(**options)
    assert get(free_children) == (None, None)
    actor = Member.options(**captured).remote()
    assert get(actor.group_of_child.remote()) == group.id
    again = child_is_in.options(num_cpus=0).remote(**options)
    assert get(again) == (None, None), "the same workers run it, and capture nothing"


def test_a_group_that_does_not_fit_waits_and_says_why(group: stoker.PlacementGroup) -> None:
    later = stoker.placement_group([{"CPU": 1}] * 3, name="later")
    assert later.wait(0.3) is False
    assert free("CPU") == CPUS - 2, "it holds nothing while it waits"
    told = explain(later.id)
    assert "1 of 3 x {1 CPU} have no room" in told["summary"]
    assert told["state"] == "PENDING"
    inside = here.options(**within(later)).remote()
    assert stoker.wait([inside], timeout=0.3)[0] == []
    stoker.remove_placement_group(group)
    assert later.wait(WAIT_S) and get(inside) == later.id
    stoker.remove_placement_group(later)


def test_a_group_that_can_never_fit_waits_for_nodes_and_says_so() -> None:
    never = stoker.placement_group([{"CPU": 99}])
    assert never.wait(1.0) is False
    assert "even when idle" in explain(never.id)["summary"]
    stoker.remove_placement_group(never)
    error = caught(lambda: never.wait(1.0), exceptions.PlacementGroupRemovedError)
    assert str(error).startswith(f"placement group {never.id} was removed")


def test_removal_ends_what_runs_inside_and_refuses_what_comes(group: stoker.PlacementGroup) -> None:
    actor = Member.options(num_cpus=1, **within(group)).remote()
    get(actor.group.remote())
    stoker.remove_placement_group(group)
    stoker.remove_placement_group(group)
    assert record(group)["state"] == "REMOVED"
    until_state(actor.actor_id, "DEAD")
    error = caught(lambda: get(actor.group.remote()), exceptions.ActorDiedError)
    assert "was removed" in str(error)
    late = here.options(**within(group)).remote()
    assert isinstance(caught(lambda: get(late)), exceptions.PlacementGroupRemovedError)
    assert isinstance(caught(lambda: get(group.ready())), exceptions.PlacementGroupRemovedError)


def test_names_are_unique_among_living_groups() -> None:
    first = stoker.placement_group([{"CPU": 1}], name="mine")
    assert stoker.get_placement_group("mine") == first
    taken = caught(lambda: stoker.placement_group([{"CPU": 1}], name="mine"))
    assert isinstance(taken, exceptions.NameTakenError) and isinstance(taken, ValueError)
    stoker.remove_placement_group(first)
    assert isinstance(caught(lambda: stoker.get_placement_group("mine")), exceptions.NotFoundError)
    second = stoker.placement_group([{"CPU": 1}], name="mine")
    assert stoker.get_placement_group("mine") == second
    stoker.remove_placement_group(second)


def test_handles_travel_and_are_equal(group: stoker.PlacementGroup) -> None:
    @stoker.remote(num_cpus=0)
    def use(handle: stoker.PlacementGroup) -> tuple[stoker.PlacementGroup, str]:
        inside = here.options(
            num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(handle)
        )
        return handle, stoker.get(inside.remote())

    assert get(use.remote(group)) == (group, group.id)
    assert pickle.loads(pickle.dumps(group)) == group
    assert group.bundle_specs == [{"CPU": 1.0}, {"CPU": 1.0}] and group.bundle_count == 2
    assert stoker.placement_group_table()[group.id]["state"] == "CREATED"


@pytest.mark.parametrize(
    ("make", "kind", "field"),
    [
        (lambda: stoker.placement_group([]), ValueError, "bundles"),
        (lambda: stoker.placement_group({"CPU": 1}), TypeError, "bundles"),  # type: ignore[arg-type]
        (lambda: stoker.placement_group([{"CPU": 1}, {}]), ValueError, "bundles.1"),
        (lambda: stoker.placement_group([{"CPU": -1}]), ValueError, "bundles.0.CPU"),
        (lambda: stoker.placement_group([{"CPU": "1"}]), TypeError, "bundles.0.CPU"),  # type: ignore[dict-item]
        (lambda: stoker.placement_group([{"GPU": 1.5}]), ValueError, "bundles.0.GPU"),
        (lambda: stoker.placement_group([{"CPU": 1}], strategy="CLOSE"), ValueError, "strategy"),
        (lambda: stoker.placement_group([{"CPU": 1}], lifetime="long"), ValueError, "lifetime"),
        (
            lambda: stoker.placement_group([{"CPU": 1}], bundle_label_selector=[]),
            ValueError,
            "bundle_label_selector",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_field(
    make: Any, kind: type[Exception], field: str
) -> None:
    error = caught(make, kind)
    assert isinstance(error, exceptions.BadRequestError) and error.field == field


def test_a_bundle_that_there_is_not_and_work_that_is_too_large_are_refused(
    group: stoker.PlacementGroup,
) -> None:
    error = caught(lambda: within(group, 2), ValueError)
    assert "none of the 2 bundles" in str(error)
    assert "no placement group" in str(caught(lambda: within("mine"), TypeError))  # type: ignore[arg-type]
    large = here.options(num_cpus=2, **within(group)).remote()
    error = caught(lambda: get(large), exceptions.InfeasibleError)
    assert "does not fit in a bundle" in str(error)


def test_a_group_ends_with_its_maker_unless_it_is_detached(tmp_path: Any) -> None:
    with head(tmp_path, num_cpus=2) as made:
        program = """
            import stoker
            stoker.init()
            own = stoker.placement_group([{"CPU": 1}], name="own", namespace="n")
            kept = stoker.placement_group([{"CPU": 1}], name="kept", namespace="n", lifetime="detached")
            assert own.wait(40) and kept.wait(40)
        """
        assert run_driver(made, program).returncode == 0
        finder = """
            import stoker
            stoker.init()
            kept = stoker.get_placement_group("kept", "n")
            assert kept.wait(40)
            try:
                stoker.get_placement_group("own", "n")
            except stoker.exceptions.NotFoundError:
                print("gone")
        """
        until(lambda: "gone" in run_driver(made, finder).stdout, WAIT_S, "the job's group is gone")
        listed = stoker_cli(made, "list", "placement-groups", "--json")
        assert [one["name"] for one in listed] == ["kept"]
        made_there = stoker_cli(
            made, "placement-group", "create", "--bundle", "CPU=1", "--name", "x", "--json"
        )
        assert made_there["state"] == "PENDING"
        group_id = made_there["group_id"]
        until(
            lambda: stoker_cli(made, "get", group_id, "--json")["state"] == "CREATED",
            WAIT_S,
            "the group is placed",
        )
        assert stoker_cli(made, "explain", group_id, "--json")["state"] == "CREATED"
        removed = stoker_cli(made, "placement-group", "remove", group_id[:12], "--json")
        assert removed["state"] == "REMOVED"


def explain(group_id: str) -> dict[str, Any]:
    from stoker.runtime import current

    http = current.runtime().job.http
    told: dict[str, Any] = http.call("GET", f"/v1/placement-groups/{group_id}/explain", reply=dict)
    return told


def stoker_cli(cluster: Any, *arguments: str) -> Any:
    told = subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(told.stdout)


def test_the_status_says_why_a_group_waits_as_its_own_explanation_does(cluster: Any) -> None:
    waits = stoker.placement_group([{"CPU": CPUS}, {"CPU": CPUS}])
    client = HttpClient(cluster.address, token=cluster.token)

    def entry() -> QueueEntry | None:
        queue = client.items("/v1/queue", Page[QueueEntry])
        return next((one for one in queue if one.group_id == waits.id), None)

    waiting = until(entry, WAIT_S, "it waits in the queue")
    assert waiting.resources == {"CPU": 2.0 * CPUS}
    assert waiting.demand is None
    shown = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "status"],
        env={**os.environ, "STOKER_ADDRESS": cluster.address, "STOKER_TOKEN": cluster.token},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    ).stdout
    assert f"1 x placement group {waits.id}" in " ".join(shown.split()), shown
    assert "does not fit on 1 node" in shown
    stoker.remove_placement_group(waits)
