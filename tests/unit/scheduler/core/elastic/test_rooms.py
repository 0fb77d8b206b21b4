"""Room for elastic jobs: what is left once other work has what it waits for, within the limits of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.elastic.rooms import (
    Free,
    Member,
    Pool,
    budgets,
    headroom,
    pools_of,
    trimmed,
    without_replicas,
)
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.queues import Account, QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from tests.unit.scheduler.core_driver import Core

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements

GPU = make_requirements({"GPU": 1, "CPU": 2})


def member(
    job_id: str = "job_1",
    wanted: Requirements = GPU,
    queue: str = "default",
    most: int = 8,
    **held: int,
) -> Member:
    return Member(job_id, Account(GCS_OWNER, job_id, "", queue), wanted, held, most)


def pool(*members: Member) -> Pool:
    (one,) = pools_of([(one.account.queue, one) for one in members])
    return one


def rooms(core: Core, *group_ids: str, wanted: Requirements = GPU) -> dict[str, int]:
    return Free.of(without_replicas(fork(core.state), group_ids)).rooms(wanted)


def test_room_is_for_whole_replicas_with_all_that_they_need() -> None:
    core = Core({"GPU": 4, "CPU": 8}, {"GPU": 4, "CPU": 5}, {"CPU": 8})
    assert rooms(core) == {"n_1": 4, "n_2": 2}
    core.ask(GPU=0.5)
    assert rooms(core) == {"n_1": 3, "n_2": 2} or rooms(core) == {"n_1": 4, "n_2": 2}
    assert rooms(core, wanted=make_requirements({"CPU": 2}))["n_3"] == 4


def test_replicas_of_elastic_jobs_are_room_and_what_waits_takes_it_first() -> None:
    core = Core({"GPU": 4, "CPU": 16})
    core.group("PACK", *[{"GPU": 1, "CPU": 2}] * 4, group_id="pg_elastic.1")
    assert rooms(core) == {}
    assert rooms(core, "pg_elastic.1") == {"n_1": 4}
    core.ask(owner="rigid", GPU=1)
    assert rooms(core, "pg_elastic.1") == {"n_1": 3}, "one waits for a GPU"
    assert (
        core.state.nodes["n_1"].devices.wholes == 4
        and not core.state.nodes["n_1"].devices.wholly_free
    )


def test_background_work_leaves_for_replicas() -> None:
    core = Core({"GPU": 4, "CPU": 16})
    for _ in range(3):
        core.ask(requirements=make_requirements({"GPU": 1, "CPU": 4}, background=True))
    assert core.state.nodes["n_1"].devices.wholly_free == 1
    assert rooms(core) == {"n_1": 4}
    core.group("PACK", *[{"GPU": 1, "CPU": 2}] * 4, group_id="pg_elastic.1")
    core.at_s = 30.0
    core.feed(ev.Tick(at_s=30.0))
    assert len(core.held("pg_elastic.1")) == 4, "the reservation ends what runs in the background"


def test_nodes_that_take_no_work_have_no_room() -> None:
    core = Core({"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 8})
    spec = make_node_spec("n_2", {"GPU": 2, "CPU": 8}, cordon="cordoned")
    core.feed(ev.NodeChanged(at_s=0.0, spec=spec))
    assert rooms(core) == {"n_1": 2}


def test_pools_are_by_queue_and_by_where_replicas_may_be() -> None:
    more = make_requirements({"GPU": 1, "CPU": 4})
    cpus = make_requirements({"CPU": 1})
    found = pools_of(
        [
            ("a", member("job_1", queue="a")),
            ("a", member("job_2", more, queue="a")),
            ("b", member("job_3", queue="b")),
            ("a", member("job_4", cpus, queue="a")),
        ]
    )
    by_jobs = {tuple(one.job_id for one in pool.members): pool for pool in found}
    assert set(by_jobs) == {("job_1", "job_2"), ("job_3",), ("job_4",)}
    both = by_jobs["job_1", "job_2"]
    assert dict(both.requirements.items) == {"CPU": 40_000}, "the most of each"
    assert both.requirements.gpu == 10_000


def test_queues_share_by_weight_and_what_one_does_not_want_the_others_have() -> None:
    small, large = pool(member(most=2)), pool(member("job_2", most=100))
    assert budgets([small, large], [1.0, 1.0], [16, 16]) == [2, 14]
    assert budgets([large, large], [1.0, 3.0], [16, 16]) == [4, 12]
    assert budgets([large, large], [1.0, 1.0], [16, 4]) == [12, 4], "a limit of the second"
    assert budgets([], [], []) == []


def test_a_pool_keeps_the_nodes_where_it_is() -> None:
    one = pool(member(n_2=3))
    assert trimmed(one, {"n_1": 4, "n_2": 4}, 5) == {"n_1": 1, "n_2": 4}
    assert trimmed(one, {"n_1": 4, "n_2": 4}, 0) == {}
    spread = pool(member(n_1=2), member("job_2", n_2=4), member("job_3", n_3=2))
    rooms = {"n_1": 4, "n_2": 4, "n_3": 4, "n_4": 4}
    assert trimmed(spread, rooms, 8) == {"n_1": 2, "n_2": 4, "n_3": 2}, "nobody moves"
    assert trimmed(spread, rooms, 9) == {"n_1": 3, "n_2": 4, "n_3": 2}
    assert trimmed(spread, rooms, 3) == {"n_2": 3}


def test_limits_of_a_queue_bound_its_replicas() -> None:
    core = Core({"GPU": 8, "CPU": 32})
    queues = (QueueSpec(name="small", limit={"GPU": 30_000}),)
    core.feed(ev.QueuesChanged(at_s=0.0, queues=queues))
    assert headroom(core.state, pool(member(queue="small"))) == 3
    assert headroom(core.state, pool(member())) == 8, "no more than its jobs want"
