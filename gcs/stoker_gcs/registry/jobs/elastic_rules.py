"""The state machine of an elastic job's generations: pure rules over its record.

================  =====================================  ==================================
replicas          event                                  then
================  =====================================  ==================================
any               the scheduler makes an offer           the same, and an open offer
any, with offer   the job accepts it                     those of the offer, its generation
any, with offer   the scheduler withdraws it             the same
some              some are lost with their node          the others, of the same generation
some              all are lost                           none, of no generation
some              it gives some back                     the others, of the same generation
some              no answer in time, to fewer            none, of no generation: preempted
any               its attempt or the job ends            none
================  =====================================  ==================================

Numbers of generations only grow, and one that was withdrawn is never given again: what runs of an older
generation can accept nothing and report nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state.records import Transition
from stoker_wire.errors import BadRequestError, ConflictError
from stoker_wire.messages.elastic import (
    AnswerOffer,
    ElasticState,
    Hints,
    MakeOffer,
    Offer,
    Replica,
    Scaling,
    WithdrawReplicas,
)
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_wire.messages.work import Job

MAX_GAMMA = 10.0
_replace = msgspec.structs.replace


def check(scaling: Scaling) -> None:
    """Raise BadRequestError, with the field, for limits that no number of replicas or no batch keeps."""
    low, high = scaling.min_replicas, scaling.max_replicas
    if low > high:
        raise BadRequestError(
            f"min_replicas: {low} is more than max_replicas, {high}\nexchange them",
            field="min_replicas",
        )
    if scaling.base_batch > scaling.most_in_batch:
        raise BadRequestError(
            f"base_batch: {scaling.base_batch} is more than max_batch, {scaling.max_batch}\n"
            "the batch for which the job was tuned is one that it may have",
            field="base_batch",
        )
    if scaling.min_local_batch > scaling.max_local_batch:
        raise BadRequestError(
            f"min_local_batch: {scaling.min_local_batch} is more than max_local_batch, "
            f"{scaling.max_local_batch}\nexchange them",
            field="min_local_batch",
        )
    if scaling.min_local_batch * low > scaling.most_in_batch:
        raise BadRequestError(
            f"min_replicas: {low} replicas with min_local_batch {scaling.min_local_batch} have more than "
            f"the {scaling.most_in_batch} samples of the largest batch\nlower one, or raise max_batch",
            field="min_replicas",
        )
    gpus = scaling.resources.get("GPU", 0.0)
    if gpus not in (0.0, 1.0):
        raise BadRequestError(
            f"resources: a replica has one GPU or none, not {gpus:g}\nask for GPU=1",
            field="resources.GPU",
        )
    if not any(scaling.resources.values()):
        raise BadRequestError("resources: a replica needs some\nask for GPU=1", field="resources")


def scaled(job: Job, scaling: Scaling, now_s: float) -> Transition[Job] | None:
    """Make a job elastic, or change its limits; None if they are these."""
    _check_lives(job)
    if job.array is not None or job.one_per_node is not None:
        raise ConflictError(
            f"job {job.job_id} is an array, and has no driver that could scale\nits members may"
        )
    known = job.elastic
    if known is None:
        return _changed(job, ElasticState(scaling=scaling, since_s=now_s), EventKind.JOB_HINTED)
    if known.scaling == scaling:
        return None
    if known.scaling.resources != scaling.resources and (known.replicas or known.offer):
        raise ConflictError(
            f"job {job.job_id} has replicas of other resources\nlet it be rigid first: "
            f"DELETE /v1/jobs/{job.job_id}/scaling"
        )
    return _changed(job, _next(known, scaling=scaling), EventKind.JOB_HINTED)


def unscaled(job: Job) -> Transition[Job] | None:
    """Make a job rigid again: its replicas are released; None if it is."""
    if job.elastic is None:
        return None
    return Transition(_replace(job, elastic=None), EventKind.JOB_SCALED)


def hinted(job: Job, hints: Hints, now_s: float) -> Transition[Job] | None:
    """Keep what a job says of itself; of numbers that are none it is counted that they came.

    Spares and unwanted replicas are kept with either: they are no measurements.
    """
    state = _elastic(job)
    problem = problem_of(hints)
    if problem:
        known = state.hints or (Hints() if hints.spares or hints.unwanted else None)
        then = _replace(
            state,
            hints=known and _replace(known, spares=hints.spares, unwanted=hints.unwanted),
            hints_dropped=state.hints_dropped + 1,
            hints_problem=problem,
            hints_at_s=now_s,
        )
    else:
        noise_scale = noise_scale_of(hints, state.scaling.base_batch)
        then = _replace(state, hints=hints, hints_at_s=now_s, noise_scale=noise_scale)
    return _changed(job, then, EventKind.JOB_HINTED)


def problem_of(hints: Hints) -> str:
    """Return what is wrong with hints, with the field; empty if nothing is."""
    for name in ("grad_sqr", "grad_var", "restart_s", "progress", "params_error", "lr_scale"):
        value = getattr(hints, name)
        if value is not None and not _is_amount(value):
            return f"{name} is {value}: it must be a number, and not negative"
    for name in ("done_fraction", "efficiency"):
        value = getattr(hints, name)
        if value is not None and not 0 <= value <= 1:
            return f"{name} is {value}: it must be from 0 to 1"
    if hints.goodput is not None and not _is_amount(hints.goodput):
        return f"goodput is {hints.goodput}: it must be a number, and not negative"
    if (hints.grad_sqr is None) != (hints.grad_var is None):
        return "grad_sqr and grad_var: one without the other says nothing (null stands for NaN)"
    if hints.params is not None:
        for name, value in msgspec.structs.asdict(hints.params).items():
            if value is None or not _is_amount(value):
                text = "NaN" if value is None else value
                return f"params.{name} is {text}: it must be a number, and not negative"
        if not 1 <= (hints.params.gamma or 0.0) <= MAX_GAMMA:
            return f"params.gamma is {hints.params.gamma}: it must be from 1 to {MAX_GAMMA:g}"
    return ""


def noise_scale_of(hints: Hints, base_batch: int) -> float | None:
    """Return phi = M0 * var / sqr, in samples; None where it was not measured, or is without bound."""
    if not hints.grad_sqr or hints.grad_var is None:
        return None
    return base_batch * hints.grad_var / hints.grad_sqr


def offered(job: Job, offer: MakeOffer, now_s: float) -> Transition[Job]:
    """Record an offer of the scheduler; ConflictError if the job has changed since, or has one open."""
    state = _at(job, offer.version)
    if state.offer is not None:
        raise ConflictError(f"job {job.job_id} has an open offer already: withdraw that first")
    count = len(offer.replicas)
    if count and not state.scaling.min_replicas <= count <= state.scaling.max_replicas:
        raise BadRequestError(
            f"replicas: {count} are not {state.scaling.min_replicas} to {state.scaling.max_replicas}",
            field="replicas",
        )
    if len(set(offer.replicas)) < count:
        raise BadRequestError("replicas: a bundle is there twice", field="replicas")
    number = state.numbered + 1
    made = Offer(
        generation=number,
        replicas=offer.replicas,
        withdraws=bool(set(state.replicas) - set(offer.replicas)),
        made_at_s=now_s,
        answer_by_s=now_s + offer.answer_within_s,
        reason=offer.reason,
    )
    then = _next(state, offer=made, numbered=number)
    return _changed(job, _replace(then, speedup=offer.speedup), EventKind.JOB_SCALED)


def accepted(job: Job, answer: AnswerOffer, now_s: float) -> Transition[Job] | None:
    """Begin the generation that was offered; None if it has begun. ConflictError for any other."""
    state = _elastic(job)
    if answer.generation == state.generation and state.generation:
        return None
    if state.offer is None or state.offer.generation != answer.generation:
        open_ = f"generation {state.offer.generation} is" if state.offer else "none is"
        raise ConflictError(
            f"generation {answer.generation} is not on offer to job {job.job_id}: {open_}\n"
            "read the state again, and go on with the replicas that it has"
        )
    then = _with_replicas(state, state.offer.replicas, now_s)
    return _changed(
        job,
        _replace(
            then,
            generation=answer.generation,
            offer=None,
            lost=0,
            unanswered=0,
            restarts=state.restarts + bool(state.generation),
        ),
        EventKind.JOB_SCALED,
    )


def withdrawn(job: Job, order: WithdrawReplicas, now_s: float) -> Transition[Job] | None:
    """Void the open offer, or take replicas that are gone, or all; None if there is nothing to take."""
    state = _at(job, order.version)
    if not order.replicas:
        if state.offer is None:
            return None
        then = _next(state, offer=None, unanswered=state.unanswered + 1)
        return _changed(job, then, EventKind.JOB_SCALED)
    gone = set(order.replicas)
    kept = tuple(replica for replica in state.replicas if replica not in gone)
    if len(kept) == len(state.replicas):
        return None
    then = _with_replicas(state, kept, now_s)
    if order.preempted or not kept:
        then = _replace(
            then,
            replicas=(),
            offer=None,
            generation=0,
            preemptions=state.preemptions + order.preempted,
            lost=0,
        )
    else:
        lost = 0 if order.returned else len(gone)
        then = _replace(then, offer=None, lost=state.lost + lost)
    return _changed(job, then, EventKind.JOB_SCALED)


def attempt_ended(state: ElasticState | None, now_s: float) -> ElasticState | None:
    """Return the state after the end of an attempt of its job: what it had is released with that."""
    if state is None:
        return None
    return _replace(_with_replicas(state, (), now_s), offer=None, generation=0, lost=0)


def _with_replicas(state: ElasticState, replicas: Sequence[Replica], now_s: float) -> ElasticState:
    """Return the state with other replicas from now on, and the service of those that it had."""
    served = max(0.0, now_s - state.since_s) * len(state.replicas)
    return _next(state, replicas=tuple(replicas), since_s=now_s, service_s=state.service_s + served)


def _next(state: ElasticState, **changes: object) -> ElasticState:
    return _replace(state, version=state.version + 1, **changes)


def _changed(job: Job, state: ElasticState, kind: EventKind) -> Transition[Job]:
    return Transition(_replace(job, elastic=state), kind)


def _at(job: Job, version: int) -> ElasticState:
    """Return the state of a job, if it is at this version still."""
    state = _elastic(job)
    if state.version != version:
        raise ConflictError(
            f"job {job.job_id} is at version {state.version} of its replicas, not {version}\nread it again"
        )
    return state


def _elastic(job: Job) -> ElasticState:
    _check_lives(job)
    if job.elastic is None:
        raise ConflictError(
            f"job {job.job_id} is not elastic\nstate its limits first: PUT /v1/jobs/{job.job_id}/scaling"
        )
    return job.elastic


def _check_lives(job: Job) -> None:
    if job.state.terminal:
        raise ConflictError(f"job {job.job_id} has ended ({job.state})")


def _is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0
