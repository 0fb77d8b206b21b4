"""A round: what each elastic job of the cluster is to have, and what its next replica would be worth.

The question to a policy (:mod:`stoker_scheduler.core.elastic.jobs`) is made of the cluster's state here, for
each pool of jobs; the answer is checked, so that no plug-in can have a GPU given away twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stoker_scheduler.core.elastic.jobs import (
    Allocation,
    ElasticJob,
    ElasticPolicy,
    Hints,
    Snapshot,
    check,
)
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
from stoker_scheduler.core.elastic.worth import Worth, worth_of
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import Requirements

if TYPE_CHECKING:
    from stoker_scheduler.core.state import State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that takes part in a round: as it stands, its hints, and what a replica of it needs.

    ``returned`` are nodes on which it gave places back not long ago.
    """

    job: ElasticJob
    hints: Hints
    account: Account
    requirements: Requirements
    returned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PoolRound:
    """The outcome of a round for a pool: the nodes' rooms, what each job is to have, and why."""

    pool: Pool
    nodes: Mapping[str, int]
    targets: Mapping[str, Allocation]
    worth: Worth | None
    error: str = ""
    """Why the policy's answer was not taken: all keep what they have."""


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of a round: that of each pool."""

    at_s: float
    pools: tuple[PoolRound, ...] = ()

    @property
    def targets(self) -> dict[str, Allocation]:
        """The allocation of each job; empty for one that is to have none."""
        return {job_id: a for one in self.pools for job_id, a in one.targets.items()}


def decide(
    twin: State,
    group_ids: Iterable[str],
    candidates: Sequence[Candidate],
    policy_of: Callable[[str], ElasticPolicy],
    now_s: float,
) -> Round:
    """Return what candidates are to have. ``twin`` is a fork of the state, which is used up.

    ``group_ids`` are the placement groups of their replicas; ``policy_of`` has the policy of each queue.
    """
    twin = without_replicas(twin, group_ids)
    candidates = [_within_limits(twin, one) for one in candidates]
    by_id = {one.job.job_id: one for one in candidates}
    members = [(one.account.queue, _member(one)) for one in candidates]
    weights = {spec.name: spec.weight for spec in twin.tenants.specs}
    free, rounds = Free.of(twin), []
    pools = pools_of(members)
    for with_gpus in (True, False):
        some = [pool for pool in pools if bool(pool.requirements.gpu) is with_gpus]
        rooms = [free.rooms(pool.requirements) for pool in some]
        within = [
            min(sum(of_pool.values()), headroom(twin, pool))
            for of_pool, pool in zip(rooms, some, strict=True)
        ]
        allowed = budgets(some, [weights.get(pool.queue, 1.0) for pool in some], within)
        for pool, budget in zip(some, allowed, strict=True):
            nodes = trimmed(pool, free.rooms(pool.requirements), budget)
            found = _round_of(pool, nodes, by_id, policy_of(pool.queue), now_s, _size(twin, pool))
            for allocation in found.targets.values():
                free.take(pool.requirements, allocation)
            rounds.append(found)
    return Round(now_s, tuple(rounds))


def _round_of(
    pool: Pool,
    nodes: Mapping[str, int],
    by_id: Mapping[str, Candidate],
    policy: ElasticPolicy,
    now_s: float,
    size: int,
) -> PoolRound:
    some = [by_id[member.job_id] for member in pool.members]
    some.sort(key=lambda one: (one.job.submitted_s, one.job.job_id))
    snapshot = Snapshot(nodes, tuple(one.job for one in some), size=size)
    hints = {one.job.job_id: one.hints for one in some}
    try:
        answer = policy.allocate(snapshot, hints, now_s)
        check(snapshot, answer)
    except Exception as error:  # a plug-in's: the round goes on without it
        present = {one.job.job_id: one.job.allocation for one in some}
        return PoolRound(pool, nodes, present, None, f"{type(error).__name__}: {error}")
    targets = {one.job.job_id: answer.get(one.job.job_id, ()) for one in some}
    _keep_away(some, nodes, targets)
    return PoolRound(pool, nodes, targets, worth_of(policy, snapshot, hints, targets, now_s))


def _keep_away(
    some: Iterable[Candidate], nodes: Mapping[str, int], targets: dict[str, Allocation]
) -> None:
    """Have jobs stay where they are that would go back, with no more replicas, to nodes that they left.

    Where there is room beside what the others are to have: a place that a job gave back is slow to it, which
    no policy knows.
    """
    used = Counter[str]()
    for allocation in targets.values():
        used.update(dict(allocation))
    for one in some:
        present, target = Counter(dict(one.job.allocation)), Counter(dict(targets[one.job.job_id]))
        more = target - present
        if present.total() == target.total() and more.keys() & one.returned:
            after = used - target + present
            if all(count <= nodes.get(node_id, 0) for node_id, count in after.items()):
                targets[one.job.job_id], used = one.job.allocation, after


def _within_limits(twin: State, one: Candidate) -> Candidate:
    """Return a job with no more replicas than the limits of its queue, user and job admit."""
    most = twin.tenants.headroom(one.account, twin.cost(one.requirements))
    return replace(one, job=replace(one.job, max_replicas=min(one.job.max_replicas, most)))


def _member(one: Candidate) -> Member:
    job = one.job
    return Member(job.job_id, one.account, one.requirements, dict(job.allocation), job.max_replicas)


def _size(twin: State, pool: Pool) -> int:
    """Return the replicas for which a whole node has room: the size that most of the room is of."""
    need = pool.requirements
    sizes = Counter(
        min(
            [node.spec.total_units.get(name, 0) // units for name, units in need.vector if units],
            default=0,
        )
        for node in twin.nodes.values()
    )
    del sizes[0]
    return max(sizes, key=lambda size: (size * sizes[size], size), default=1)
