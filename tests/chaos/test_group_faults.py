"""Placement groups when nodes, schedulers and the gcs die: whole again, or waiting, never half-held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import PlacementGroupSchedulingStrategy, exceptions
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import caught, session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

WAIT_S = 60.0


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Apart]:
    """Three nodes of one CPU each; this process is the driver, on the first."""
    with session_root(tmp_path / "s"), apart(tmp_path, nodelets=1, cpus=1) as made:
        stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
        made.add_nodelet(cpus=1)
        made.add_nodelet(cpus=1)
        try:
            yield made
        finally:
            stoker.shutdown()


@stoker.remote(num_cpus=1)
def node() -> str:
    return stoker.get_runtime_context().node_id


def nodes_of(group: stoker.PlacementGroup) -> dict[int, str]:
    """The node of each bundle that the gcs has recorded."""
    record = stoker.placement_group_table(group)
    return {int(i): placed["node_id"] for i, placed in record["placements"].items()}


def run_in(group: stoker.PlacementGroup, index: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, index)
    return node.options(scheduling_strategy=strategy, max_retries=0).remote()


def name_of(cluster: Apart, node_id: str) -> str:
    return next(name for name, one in cluster.nodes().items() if one["node_id"] == node_id)


def kill_node_of(cluster: Apart, group: stoker.PlacementGroup, avoid: str = "n0") -> int:
    """Kill the node of some bundle, but not this driver's; return the bundle's number."""
    for index, node_id in nodes_of(group).items():
        name = name_of(cluster, node_id)
        if name != avoid:
            cluster.nodelets[int(name[1:])].kill()
            return index
    raise AssertionError("every bundle is on the driver's node")


@pytest.mark.parametrize("reschedule", ["bundles", "group"])
def test_bundles_of_a_node_that_dies_are_placed_again(trio: Apart, reschedule: str) -> None:
    group = stoker.placement_group(
        [{"CPU": 1}] * 2, strategy="STRICT_SPREAD", reschedule=reschedule
    )
    assert group.wait(WAIT_S)
    before = nodes_of(group)
    lost = kill_node_of(trio, group)
    until(
        lambda: stoker.placement_group_table(group)["reschedules"] == 1, WAIT_S, "the loss is known"
    )
    assert group.wait(WAIT_S)
    after = nodes_of(group)
    assert after[lost] != before[lost] and len(set(after.values())) == 2
    assert stoker.get([run_in(group, i) for i in range(2)], timeout=WAIT_S) == [after[0], after[1]]
    stoker.remove_placement_group(group)


def test_a_group_that_lost_a_node_for_good_waits_for_another(trio: Apart) -> None:
    group = stoker.placement_group([{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
    assert group.wait(WAIT_S)
    lost = kill_node_of(trio, group)
    until(
        lambda: stoker.placement_group_table(group)["state"] == "RESCHEDULING",
        WAIT_S,
        "the loss is known",
    )
    waits = run_in(group, lost)
    assert group.wait(0.5) is False
    kept = next(index for index in range(3) if index != lost)
    assert stoker.get(run_in(group, kept), timeout=WAIT_S) == nodes_of(group)[kept]
    trio.add_nodelet(cpus=1)
    assert group.wait(WAIT_S)
    assert stoker.get(waits, timeout=WAIT_S) == nodes_of(group)[lost]


def test_a_new_scheduler_knows_the_groups_and_what_is_in_them(trio: Apart) -> None:
    group = stoker.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(WAIT_S)
    before = stoker.get([run_in(group, i) for i in range(2)], timeout=WAIT_S)
    trio.scheduler.kill()
    trio.scheduler.start()
    assert stoker.get([run_in(group, i) for i in range(2)], timeout=WAIT_S) == before
    until(lambda: stoker.available_resources().get("CPU") == 1.0, WAIT_S, "one CPU is not held")
    stoker.remove_placement_group(group)
    until(lambda: stoker.available_resources().get("CPU") == 3.0, WAIT_S, "all CPUs are free")


def test_a_group_that_was_removed_while_no_scheduler_ran_is_released(trio: Apart) -> None:
    group = stoker.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(WAIT_S)
    trio.scheduler.kill()
    stoker.remove_placement_group(group)
    trio.scheduler.start()
    until(lambda: stoker.available_resources().get("CPU") == 3.0, WAIT_S, "all CPUs are free")
    error = caught(lambda: stoker.get(run_in(group, 0), timeout=WAIT_S))
    assert isinstance(error, (exceptions.PlacementGroupRemovedError, exceptions.InfeasibleError))


def test_groups_outlive_the_gcs_and_are_placed_by_the_next(trio: Apart) -> None:
    held = stoker.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert held.wait(WAIT_S)
    waits = stoker.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert waits.wait(0.2) is False
    trio.gcs.kill()
    trio.gcs.start()
    assert stoker.placement_group_table(held)["state"] == "CREATED"
    assert stoker.get(run_in(held, 0), timeout=WAIT_S) == nodes_of(held)[0]
    stoker.remove_placement_group(held)
    assert waits.wait(WAIT_S)
