"""Placement groups as Ray's public tests have them, as far as these use its public API.

What other files test already is left out: strategies, names, capture, detached groups, lost nodes.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker import PlacementGroupSchedulingStrategy as In
from stoker.exceptions import ActorDiedError, PlacementGroupRemovedError, WorkerDiedError
from tests.e2e.conftest import get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Cluster

CPUS = 4
"""Of the cluster."""


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


@stoker.remote(num_cpus=1)
class Counter:
    def ready(self) -> int:
        return 1


def test_an_amount_of_zero_is_none_and_a_full_bundle_is_still_ready() -> None:
    group = stoker.placement_group([{"CPU": 1, "GPU": 0}])
    get(group.ready())
    inside = Counter.options(scheduling_strategy=In(group)).remote()
    assert get(inside.ready.remote()) == 1
    made = get(group.ready())
    assert (made.id, made.bundle_specs) == (group.id, group.bundle_specs)
    stoker.remove_placement_group(group)


def test_a_group_is_removed_more_than_once_and_then_waited_for_by_nobody() -> None:
    group = stoker.placement_group([{"CPU": 2}, {"CPU": 2}])
    assert group.wait(20)
    for _ in range(3):
        stoker.remove_placement_group(group)
    assert stoker.placement_group_table(group)["state"] == "REMOVED"
    with pytest.raises(PlacementGroupRemovedError):
        group.wait(20)


def test_a_group_that_cannot_be_placed_is_pending_and_removed_at_once() -> None:
    group = stoker.placement_group([{"CPU": 2}, {"GPU": 50}])
    ready = group.ready()
    assert stoker.wait([ready], timeout=0.1) == ([], [ready])
    assert stoker.placement_group_table(group)["state"] == "PENDING"
    with pytest.raises(stoker.exceptions.GetTimeoutError):
        stoker.get(ready, timeout=0.1)
    stoker.remove_placement_group(group)
    with pytest.raises(PlacementGroupRemovedError):
        get(ready)


def test_groups_that_want_more_than_there_is_take_turns() -> None:
    groups = [stoker.placement_group([{"CPU": CPUS / 2}]) for _ in range(6)]
    waiting = {group.ready(): group for group in groups}
    while waiting:
        ready, _ = stoker.wait(list(waiting), timeout=30)
        assert ready, "the next has its turn"
        get(ready[0])
        stoker.remove_placement_group(waiting.pop(ready[0]))


def test_removal_ends_what_is_inside_and_frees_all_of_it() -> None:
    @stoker.remote(num_cpus=2, max_retries=0)
    def long() -> None:
        time.sleep(600)

    @stoker.remote(num_cpus=CPUS)
    def whole() -> int:
        return 3

    group = stoker.placement_group([{"CPU": 2}, {"CPU": 2}])
    task = long.options(scheduling_strategy=In(group)).remote()
    actor = Counter.options(num_cpus=2, scheduling_strategy=In(group)).remote()
    assert get(actor.ready.remote()) == 1
    stoker.remove_placement_group(group)
    assert get(whole.remote()) == 3
    with pytest.raises(ActorDiedError):
        get(actor.ready.remote())
    with pytest.raises((WorkerDiedError, PlacementGroupRemovedError)):
        get(task)


def test_groups_on_one_node_have_gpus_of_their_own() -> None:
    @stoker.remote(num_cpus=0, num_gpus=1)
    def visible() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    groups = [stoker.placement_group([{"GPU": 1}]) for _ in range(2)]
    seen = get([visible.options(scheduling_strategy=In(one)).remote() for one in groups])
    assert len(set(seen)) == 2
    for one in groups:
        stoker.remove_placement_group(one)


def test_many_groups_with_actors_start_as_many_as_there_is_room_for() -> None:
    groups = [stoker.placement_group([{"CPU": 1}]) for _ in range(100)]
    actors = [Counter.options(scheduling_strategy=In(one)).remote() for one in groups]
    refs = [actor.ready.remote() for actor in actors]
    ready, others = stoker.wait(refs, num_returns=CPUS, timeout=60)
    assert get(ready) == [1] * CPUS
    states = {id: one["state"] for id, one in stoker.placement_group_table().items()}
    assert sum(state == "CREATED" for state in states.values()) == CPUS
    # Those that wait go first: the room of one that runs would start the next, and its call be answered.
    for one in sorted(groups, key=lambda group: states[group.id] == "CREATED"):
        stoker.remove_placement_group(one)
    for ref in others:
        with pytest.raises(ActorDiedError):
            get(ref)
