"""A round on the state of a cluster: what elastic jobs are to have, beside rigid work and other queues."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.jobs import (
    Allocation,
    ElasticJob,
    ElasticPolicy,
    Hints,
    Snapshot,
    replicas_of,
)
from stoker_scheduler.core.elastic.rounds import Candidate, Round, decide
from stoker_scheduler.core.model.queues import Account, QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from tests.unit.scheduler.core_driver import Core

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMITS = BatchLimits(min_batch=128, max_batch=8192, min_local=16, max_local=128)
SCALES = ThroughputParams(0.1, 0.002, 0.02, 0.0005, 0.01, 0.0005, 1.5)
NOISE = GradientNoise(sqr=1.0, var=100.0)
GPU = make_requirements({"GPU": 1})


def candidate(
    job_id: str,
    allocation: Allocation = (),
    *,
    queue: str = "default",
    known: bool = True,
    **more: Any,
) -> Candidate:
    hints = Hints(LIMITS, SCALES, NOISE, 16, 1.0) if known else Hints(LIMITS)
    job = ElasticJob(job_id, 0.0, allocation, **{"max_replicas": 64, **more})
    return Candidate(job, hints, Account(GCS_OWNER, job_id, "", queue), GPU)


def round_of(
    core: Core,
    *candidates: Candidate,
    groups: tuple[str, ...] = (),
    policy: ElasticPolicy | None = None,
    at_s: float = 1000.0,
) -> Round:
    chosen = policy or GoodputPolicy()
    return decide(fork(core.state), groups, candidates, lambda _: chosen, at_s)


def counts(round_: Round) -> dict[str, int]:
    return {name: replicas_of(one) for name, one in round_.targets.items()}


def test_jobs_share_what_there_is_and_keep_it_for_twenty_rounds() -> None:
    core = Core({"GPU": 4}, {"GPU": 4})
    present: dict[str, Allocation] = {"job_1": (), "job_2": ()}
    targets = round_of(core, *(candidate(name) for name in present)).targets
    assert sum(map(replicas_of, targets.values())) == 8
    for number in range(20):
        again = round_of(
            core,
            *(candidate(name, targets[name]) for name in present),
            at_s=1000.0 + 60 * number,
        )
        assert again.targets == targets, f"round {number}"


def test_rigid_work_comes_first_whether_it_runs_or_waits() -> None:
    core = Core({"GPU": 4})
    core.ask(GPU=1)
    assert counts(round_of(core, candidate("job_1"))) == {"job_1": 2}, "three are left"
    core.group("PACK", *[{"GPU": 1}] * 3, group_id="pg_elastic.1")
    waiting = core.ask(owner="p_2", GPU=2)
    assert core.granted(waiting) is None
    found = round_of(core, candidate("job_1", (("n_1", 2),)), groups=("pg_elastic.1",))
    (pool,) = found.pools
    assert dict(pool.nodes) == {"n_1": 1}
    assert counts(found) == {"job_1": 1}


def test_a_job_whose_least_has_no_room_gets_none() -> None:
    core = Core({"GPU": 2})
    assert round_of(core, candidate("job_1", min_replicas=4)).targets == {"job_1": ()}


def test_queues_have_their_weights_and_limits() -> None:
    core = Core({"GPU": 8})
    core.feed(
        ev.QueuesChanged(
            at_s=0.0,
            queues=(QueueSpec(name="a", weight=3.0), QueueSpec(name="b", limit={"GPU": 20_000})),
        )
    )
    both = round_of(core, candidate("job_1", queue="a"), candidate("job_2", queue="b"))
    assert counts(both)["job_2"] <= 2
    assert counts(both)["job_1"] >= 4


def test_a_limit_of_each_job_bounds_what_it_is_to_have() -> None:
    core = Core({"GPU": 8})
    small = QueueSpec(name="a", job_limit={"GPU": 20_000})
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(small,)))
    found = round_of(core, candidate("job_1", queue="a"), candidate("job_2", queue="a"))
    assert counts(found) == {"job_1": 2, "job_2": 2}
    beyond = round_of(core, candidate("job_1", queue="a", min_replicas=4))
    assert counts(beyond) == {"job_1": 0}, "less than its least is of no use"


def test_a_policy_that_fails_or_gives_away_too_much_changes_nothing() -> None:
    class Broken:
        def allocate(
            self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
        ) -> dict[str, Allocation]:
            raise RuntimeError("no idea")

    class Greedy:
        def allocate(
            self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
        ) -> dict[str, Allocation]:
            return {job.job_id: (("n_1", 4),) for job in snapshot.jobs}

    core = Core({"GPU": 4})
    jobs = [candidate("job_1", (("n_1", 2),)), candidate("job_2")]
    for policy, said in (
        (Broken(), "RuntimeError: no idea"),
        (Greedy(), "ValueError: node 'n_1' has 4 GPUs, not 8"),
    ):
        found = round_of(core, *jobs, policy=policy)
        assert found.targets == {"job_1": (("n_1", 2),), "job_2": ()}
        assert [one.error for one in found.pools] == [said]


def test_the_worth_of_a_replica_and_of_a_node_is_said() -> None:
    core = Core({"GPU": 4}, {"GPU": 4})
    targets = round_of(core, candidate("job_1"), candidate("job_2")).targets
    found = round_of(core, *(candidate(name, one) for name, one in targets.items()))
    worth = found.pools[0].worth
    assert worth is not None
    one = worth.jobs["job_1"]
    assert one.more == 8 and one.gain is not None and one.loss is not None
    assert 0 < one.gain < one.loss, "the next is worth less than the last, or it would have it"
    assert worth.holder_for("job_1") == "job_2"
    assert set(worth.node_less) == {"n_1", "n_2"}
    assert 0 < worth.node_more < min(worth.node_less.values())
    assert one.speedup is not None and 2 < one.speedup <= 4


def test_nodes_of_which_others_have_a_part_are_used() -> None:
    core = Core({"GPU": 4}, {"GPU": 4}, {"GPU": 4})
    for _ in range(3):
        core.ask(GPU=1)
    free = {name: node.devices.wholly_free for name, node in core.state.nodes.items()}
    found = round_of(core, *(candidate(f"job_{i}", known=False) for i in range(6)))
    assert dict(found.pools[0].nodes) == {name: count for name, count in free.items() if count}
    assert sum(counts(found).values()) >= sum(free.values()) - 2


def test_a_round_moves_no_job_back_to_a_node_on_which_it_gave_a_place_back_but_for_more() -> None:
    core = Core({"GPU": 2}, {"GPU": 2})
    present: Allocation = (("n_1", 1), ("n_2", 1))
    one = candidate("job_1", present, min_replicas=2, max_replicas=3)
    assert round_of(core, one).targets["job_1"] == (("n_1", 2),), "one node is better than two"
    away = replace(one, returned=frozenset({"n_1"}))
    assert round_of(core, away).targets["job_1"] == present
    grown = replace(away, job=replace(away.job, max_replicas=4))
    assert replicas_of(round_of(core, grown).targets["job_1"]) == 4
    other = candidate("job_2", (("n_2", 1),), min_replicas=2, max_replicas=2)
    both = round_of(core, away, other).targets
    assert {name: replicas_of(target) for name, target in both.items()} == {"job_1": 2, "job_2": 2}
    used = Counter[str]()
    for target in both.values():
        used.update(dict(target))
    assert used == {"n_1": 2, "n_2": 2}, "others that need the room come first"
