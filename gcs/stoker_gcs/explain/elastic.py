"""Reasons for the replicas of an elastic job: what its next one would be worth, and who holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_wire.messages.elastic import ElasticPlan, ElasticState, PlannedScaling
    from stoker_wire.messages.work import Job


def clause_of(job: Job, state: ElasticState, plan: ElasticPlan | None) -> str:
    """Return in words how an elastic job stands, and by the plan of a round, why."""
    parts = [_standing(state)]
    if state.hints_problem:
        parts.append(f"its last hints were dropped: {state.hints_problem}")
    if plan is None:
        parts.append("the scheduler does not say what its next replica is worth")
    else:
        planned = next(
            (one for pool in plan.pools for one in pool.jobs if one.job_id == job.job_id), None
        )
        rooms = sum(
            sum(pool.rooms.values())
            for pool in plan.pools
            if any(one.job_id == job.job_id for one in pool.jobs)
        )
        parts.append(_next_one(state, planned, rooms))
    return "; ".join(part for part in parts if part)


def _standing(state: ElasticState) -> str:
    where = ", ".join(f"{count} on {node}" for node, count in state.allocation().items())
    has = f"it is elastic and has {len(state.replicas)} replicas" + (f" ({where})" if where else "")
    if state.offer is not None:
        has += f", and is offered {len(state.offer.replicas)}"
        has += f" because {state.offer.reason}" if state.offer.reason else ""
    return has


def _next_one(state: ElasticState, planned: PlannedScaling | None, rooms: int) -> str:
    if planned is None:
        return "it takes no part in rounds until its driver runs"
    if not rooms:
        return "no node has room for a replica of it: other work has it all"
    least, wanted = state.scaling.min_replicas, sum(planned.target.values())
    if len(state.replicas) < least and rooms < least:
        does = "trains" if state.generation else "begins"
        return f"it {does} with {least} replicas at least, and nodes have room for {rooms}"
    told = "" if wanted == len(state.replicas) else f"the next round gives it {wanted}; "
    if state.hints is None or state.hints.params is None:
        told += "it has not said yet how fast it is, so it gets few; "
    if planned.more is None or planned.more_worth is None:
        if not state.replicas and not wanted:
            return f"no round has room for the {least} replicas with which it begins at least"
        return f"{told}it could use no more than it has"
    if wanted and planned.more_worth <= 0 and planned.speedup and planned.more_speedup:
        gain = planned.more_speedup / planned.speedup
        return (
            f"{told}with {planned.more} replicas it would be {gain:.3g} times as fast as with {wanted}, by "
            "what it has measured: less than a change of its replicas, and their use to others, cost"
        )
    text = f"{told}the next, up to {planned.more}, would be worth {planned.more_worth:.3g} each"
    if not planned.held_by or planned.held_worth is None:
        return f"{text}, and no other elastic job has any"
    holder = f"job {planned.held_by} needs its own least, at {planned.held_worth:.3g}"
    return f"{text}; of those that others have, {holder}"
