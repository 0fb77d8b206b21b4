"""Elastic jobs of the gcs, as the core's rounds take them. Numbers that are none never reach a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints
from stoker_scheduler.core.elastic.rounds import Candidate
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from stoker_scheduler.elastic.directory import bundle_of
from stoker_scheduler.wire_types import gang_of
from stoker_wire.messages.elastic import by_node
from stoker_wire.messages.groups import GroupStrategy

if TYPE_CHECKING:
    from stoker_scheduler.core.model.node_filters import NodeFilter
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_wire.messages.elastic import ElasticState, Scaling
    from stoker_wire.messages.elastic import Hints as WireHints
    from stoker_wire.messages.work import Job

RESTART_S = 30.0
"""What a change of replicas costs a job that has measured none."""


def candidate_of(
    job: Job,
    state: ElasticState,
    filters: tuple[NodeFilter, ...],
    now_s: float,
    returned: frozenset[str] = frozenset(),
) -> Candidate:
    """Return a job as a round sees it: with what it is offered, if it has not answered yet.

    ``filters`` are the node filters of its queue, ``returned`` the nodes on which it gave places back.
    """
    scaling, replicas = state.scaling, state.replicas
    if state.offer is not None:
        replicas = state.offer.replicas
    limits = limits_of(scaling)
    return Candidate(
        job=ElasticJob(
            job_id=job.job_id,
            submitted_s=job.created_at_s,
            allocation=tuple(by_node(replicas).items()),
            service_gpu_s=state.service_s + len(state.replicas) * max(0.0, now_s - state.since_s),
            restarts=state.restarts,
            min_replicas=scaling.min_replicas,
            max_replicas=max(scaling.min_replicas, min(scaling.max_replicas, limits.max_replicas)),
        ),
        hints=hints_of(state.hints, limits),
        account=Account(GCS_OWNER, job.job_id, job.user, job.queue),
        requirements=requirements_of_replica(scaling, filters),
        returned=returned,
    )


def limits_of(scaling: Scaling) -> BatchLimits:
    """Return the batches that a job may run with."""
    return BatchLimits(
        min_batch=scaling.base_batch,
        max_batch=scaling.most_in_batch,
        min_local=scaling.min_local_batch,
        max_local=scaling.max_local_batch,
    )


def hints_of(said: WireHints | None, limits: BatchLimits) -> Hints:
    """Return a job's hints; of what is missing, or makes no sense, nothing is known."""
    if said is None:
        return Hints(limits)
    params = noise = None
    try:
        if said.params is not None:
            params = ThroughputParams(**msgspec.structs.asdict(said.params))
        if limits.min_batch == limits.max_batch:
            noise = GradientNoise(sqr=1.0, var=0.0)  # of one batch the efficiency is 1
        elif said.grad_sqr is not None and said.grad_var is not None:
            noise = GradientNoise(sqr=said.grad_sqr, var=said.grad_var)
    except (TypeError, ValueError):
        params = noise = None
    return Hints(
        limits=limits,
        params=params,
        noise=noise,
        profiled_replicas=said.profiled_replicas,
        restart_s=RESTART_S if said.restart_s is None else said.restart_s,
        progress=said.progress or 0.0,
        done=said.done_fraction,
    )


def requirements_of_replica(scaling: Scaling, filters: tuple[NodeFilter, ...] = ()) -> Requirements:
    """Return what one replica needs of a node."""
    return gang_of((bundle_of(scaling),), GroupStrategy.PACK, filters=filters).bundles[0]
