"""Diagnoses: why a request waits, what binds it, who holds what it wants, and what would let it start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_scheduler.core.dry_run.remedies import Remedy, is_counted, remedies
from stoker_scheduler.core.leases.lease import LeaseState
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.resources import joined
from stoker_scheduler.core.placement.explain import (
    PlacementExplanation,
    explain,
    nearest_of,
    starting_text,
)
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule
from stoker_scheduler.core.queueing.queue import PendingRequest, account_of
from stoker_scheduler.core.queueing.tenants import Hold

if TYPE_CHECKING:
    from stoker_scheduler.core.events import LeaseRequested
    from stoker_scheduler.core.state import State

MAX_HOLDERS = 20


class ConstraintKind(StrEnum):
    """The kinds of constraint that keep a request from starting; the values are those of the wire."""

    INFEASIBLE = "infeasible"
    """No node that there is could ever take it."""
    QUEUE_LIMIT = "queue_limit"
    CAPACITY = "capacity"
    """Others hold what it wants."""
    RESERVATION = "reservation"
    NODE = "node"
    """The nodes with room take nothing now: they drain, are silent, or refused a start."""
    PREEMPTION = "preemption"
    """Leases have been asked back for it and have not ended yet."""
    GROUP = "placement_group"
    """Its placement group has no room for it, or is not placed."""
    STARTING = "starting"
    """It has a node, where its worker starts."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The binding constraint of a request, in words; ``queue`` and ``resource`` name what it is about."""

    kind: ConstraintKind
    text: str
    queue: str = ""
    resource: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that is known of why a request waits; without a ``constraint`` it would start now."""

    placement: PlacementExplanation
    constraint: Constraint | None
    hold: Hold | None
    pending: PendingRequest | None
    position: int | None
    starting: str
    remedies: tuple[Remedy, ...]
    holders: tuple[LeaseState, ...]


def diagnose(
    state: State, request: LeaseRequested, *, at_s: float, try_remedies: bool
) -> Diagnosis:
    """Diagnose a request, or what waits of its job with equal requirements; nothing changes.

    ``try_remedies`` costs some copies of the state, two at least.
    """
    requirements = request.requirements
    pending = state.pending.get(request.request_id) or _first_waiting(state, request)
    waits = pending is not None and pending.wanted > 0
    placement = explain(state, requirements, request.name, request.locality, request.kernels)
    account = account_of(request) if pending is None else pending.account
    hold = state.hold(account, requirements)
    starting = starting_text(state, requirements, request.job_id, request.setup, now_s=at_s)
    asked = pending.request if pending is not None else request
    if not starting and pending is not None and not waits:
        nodes = {state.leases[i].node_id for i in (*pending.starting, *pending.ready)}
        starting = f"its bundles are being held on {joined(sorted(nodes))}"
    constraint = _constraint(state, asked, placement, hold, starting, waits=waits)
    is_bound = constraint is not None and constraint.kind is not ConstraintKind.STARTING
    found = remedies(state, asked) if try_remedies and is_bound else ()
    return Diagnosis(
        placement=placement,
        constraint=constraint,
        hold=hold,
        pending=pending if waits else None,
        position=state.queue.position(pending) if waits and pending is not None else None,
        starting=starting,
        remedies=found,
        holders=_holders(state, asked, placement, hold, found) if is_bound else (),
    )


def _first_waiting(state: State, request: LeaseRequested) -> PendingRequest | None:
    subqueue = state.queue.subqueues.get(request.requirements)
    waiting = subqueue.pending() if subqueue is not None else ()
    of_job = (one for one in waiting if one.request.job_id == request.job_id)
    return min(of_job, key=lambda one: (one.since_s, one.seq), default=None)


def _constraint(
    state: State,
    request: LeaseRequested,
    placement: PlacementExplanation,
    hold: Hold | None,
    starting: str,
    *,
    waits: bool,
) -> Constraint | None:
    requirements, kind = request.requirements, ConstraintKind
    if starting and not waits:
        return Constraint(kind.STARTING, starting)
    if hold is not None:
        return Constraint(kind.QUEUE_LIMIT, hold.text, hold.queue, hold.resource)
    if placement.fit is NodeFit.NEVER:
        return Constraint(kind.INFEASIBLE, placement.summary)
    if placement.fit is NodeFit.FITS:
        return None
    leaving = state.preemptions.victims(request.requirements)
    if leaving:
        count = "1 lease has" if len(leaving) == 1 else f"{len(leaving)} leases have"
        return Constraint(kind.PREEMPTION, f"{count} been asked back for it, and must end first")
    if isinstance(requirements, Gang):
        return Constraint(kind.CAPACITY, placement.summary)
    if requirements.group_id:
        return Constraint(kind.GROUP, placement.summary)
    nearest = nearest_of(placement.verdicts)
    text = f"{nearest.node_id}, the nearest: {nearest.detail}"
    if Rule.AVAILABLE in nearest.rules:
        return Constraint(kind.CAPACITY, text, resource=nearest.lacks)
    if Rule.RESERVED in nearest.rules:
        return Constraint(kind.RESERVATION, text + _reserved_until(state, nearest.node_id))
    return Constraint(kind.NODE, text)


def _reserved_until(state: State, node_id: str) -> str:
    claimant = state.nodes[node_id].reserved_for
    reservation = state.reserved.get(claimant) if claimant is not None else None
    if claimant is None or reservation is None:
        return ""
    return f", {claimant.text}; for {max(0.0, reservation.until_s - state.at_s):.0f} s at most"


def _holders(
    state: State,
    request: LeaseRequested,
    placement: PlacementExplanation,
    hold: Hold | None,
    found: tuple[Remedy, ...],
) -> tuple[LeaseState, ...]:
    """Return the leases that hold what the request wants; those first whose end would do."""
    holders = {lease.lease_id: lease for remedy in found for lease in remedy.leases}
    names = request.requirements.names
    if hold is not None:
        names = frozenset({hold.resource})
        candidates = [one for one in state.leases.values() if is_counted(state, one, request, hold)]
    else:
        busy = [v.node_id for v in placement.verdicts if v.fit is NodeFit.BUSY]
        on_node = (i for n in busy if n in state.nodes for i in state.nodes[n].leases)
        candidates = [state.leases[i] for i in on_node]
    for lease in candidates:
        if len(holders) >= MAX_HOLDERS:
            break
        if any(lease.has_allocated(name) for name in names):
            holders.setdefault(lease.lease_id, lease)
    return tuple(state.leases[i] for i in holders if i in state.leases)[:MAX_HOLDERS]
