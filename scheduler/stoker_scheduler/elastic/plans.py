"""Plans of rounds: what one would decide now, for the controller and for who asks.

numpy is imported with the first plan.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker_scheduler.core.dry_run.fork import fork
from stoker_wire.messages.elastic import ElasticPlan, PlannedScaling, PoolPlan

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_scheduler.core.elastic.jobs import ElasticPolicy
    from stoker_scheduler.core.elastic.rooms import Member
    from stoker_scheduler.core.elastic.rounds import PoolRound, Round
    from stoker_scheduler.core.elastic.worth import Worth
    from stoker_scheduler.core.model.node_filters import NodeFilter
    from stoker_scheduler.core.state import State
    from stoker_scheduler.elastic.directory import ElasticDirectory
    from stoker_scheduler.jobs import JobDirectory
    from stoker_wire.messages.work import Job


class Cluster(Protocol):
    """The engine, as far as the controller uses it."""

    state: State
    jobs: JobDirectory
    elastic: ElasticDirectory
    elastic_policy: str
    elastic_fairness: float | None

    def now(self) -> float:
        """Return the time, in seconds since 1970."""


async def plan_round(cluster: Cluster, policies: dict[str, ElasticPolicy] | None = None) -> Round:
    """Return what a round would decide now; nothing is changed by it, but what ``policies`` remember."""
    from stoker_scheduler.core.elastic.rounds import decide
    from stoker_scheduler.elastic.candidates import candidate_of
    from stoker_scheduler.elastic.policies import make

    now_s, known = cluster.now(), {} if policies is None else policies
    elastic = cluster.elastic
    candidates = [
        candidate_of(
            job, state, filters_of(cluster, job), now_s, elastic.returned(job.job_id, now_s)
        )
        for job, state in elastic.running()
    ]
    groups, twin = tuple(elastic.groups), fork(cluster.state)

    def policy_of(queue: str) -> ElasticPolicy:
        if queue not in known:
            known[queue] = make(cluster.elastic_policy, cluster.elastic_fairness)
        return known[queue]

    return await asyncio.to_thread(decide, twin, groups, candidates, policy_of, now_s)


def filters_of(cluster: Cluster, job: Job) -> tuple[NodeFilter, ...]:
    """Return the node filters of a job's queue."""
    facts = cluster.jobs.get(job.job_id)
    return () if facts is None else facts.node_filters


def elastic_plan_of(round_: Round) -> ElasticPlan:
    """Return a round as the wire has it."""
    return ElasticPlan(at_s=round_.at_s, pools=tuple(map(_pool_plan, round_.pools)))


def _pool_plan(one: PoolRound) -> PoolPlan:
    worth = one.worth
    return PoolPlan(
        queue=one.pool.queue,
        rooms=dict(one.nodes),
        jobs=tuple(
            _planned(member, one.pool.queue, one.targets[member.job_id], worth)
            for member in one.pool.members
        ),
        node_more=None if worth is None else worth.node_more,
        node_less={} if worth is None else dict(worth.node_less),
        error=one.error,
    )


def _planned(member: Member, queue: str, target: Allocation, worth: Worth | None) -> PlannedScaling:
    own = None if worth is None else worth.jobs.get(member.job_id)
    planned = PlannedScaling(
        job_id=member.job_id, queue=queue, present=dict(member.held), target=dict(target)
    )
    if own is None or worth is None:
        return planned
    holder = worth.holder_for(member.job_id)
    return msgspec.structs.replace(
        planned,
        speedup=own.speedup,
        more=own.more,
        more_worth=own.gain,
        more_speedup=own.more_speedup,
        less_worth=own.loss,
        held_by=holder,
        held_worth=worth.jobs[holder].loss if holder else None,
    )
