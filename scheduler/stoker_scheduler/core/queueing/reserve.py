"""Reservations: a node reserved for a demand that has waited long, so that smaller ones cannot starve it.

Only what the demand lacks there is reserved (a node whose GPU is awaited still takes CPU work), only
where ending tasks can make it fit, for a bounded time, and for a few demands at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lifecycle import cancel_reservation
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.feasibility import (
    Rule,
    could_ever_fit,
    first_obstacle,
    obstacles,
)
from stoker_scheduler.core.state import Reservation, State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.queue import Subqueue

UNWANTED_GRACE_S = 1.0
"""A reservation outlives its last waiting request by this: the owner may only be repeating it."""
SEARCH_PAUSE_S = 1.0


def update_reservations(state: State, waiting: Sequence[Subqueue]) -> None:
    """End reservations that are over, and make one for each subqueue that has waited too long."""
    at_s, policy = state.at_s, state.policy
    subqueues = {subqueue.requirements: subqueue for subqueue in waiting}
    top = max((_priority(state, subqueue) for subqueue in waiting), default=0)
    for requirements in list(state.reserved):
        _review_reservation(state, requirements, subqueues.get(requirements), top)
    for subqueue in waiting:
        requirements = subqueue.requirements
        if requirements in state.reserved or len(state.reserved) >= policy.max_reserved:
            continue
        head = subqueue.head(at_s, policy.aging_s)
        due_s = max(
            head.since_s + policy.reserve_after_s, state.reserve_due_s.get(requirements, 0.0)
        )
        if at_s < due_s or _priority(state, subqueue) < top:
            continue
        if len(state.reserve_due_s) > 1000:
            state.reserve_due_s.clear()
        state.reserve_due_s[requirements] = at_s + SEARCH_PAUSE_S
        node = _choose_node(state, requirements)
        if node is not None:
            node.reserved_for = requirements
            node.reserved_names = _missing_names(node, requirements)
            state.mark_dirty(node.node_id)
            state.reserved[requirements] = Reservation(node.node_id, at_s + policy.reserve_for_s)
            state.set_timer(at_s + policy.reserve_for_s, Timer.CYCLE)


def _priority(state: State, subqueue: Subqueue) -> int:
    return subqueue.head(state.at_s, state.policy.aging_s).request.priority


def _review_reservation(
    state: State, requirements: Requirements, subqueue: Subqueue | None, top: int
) -> None:
    at_s, reservation = state.at_s, state.reserved[requirements]
    node = state.nodes[reservation.node_id]
    if subqueue is None:
        if reservation.unwanted_since_s is None:
            reservation.unwanted_since_s = at_s
            state.set_timer(at_s + UNWANTED_GRACE_S, Timer.CYCLE)
        if at_s >= reservation.unwanted_since_s + UNWANTED_GRACE_S:
            cancel_reservation(state, requirements)
        return
    reservation.unwanted_since_s = None
    if at_s >= reservation.until_s:
        state.reserve_due_s[requirements] = at_s + state.policy.reserve_for_s
        cancel_reservation(state, requirements)
    elif _priority(state, subqueue) < top:
        cancel_reservation(state, requirements)
    else:
        names = _missing_names(node, requirements)
        if names != node.reserved_names:
            node.reserved_names = names
            state.mark_dirty(node.node_id)


def _missing_names(node: NodeInfo, requirements: Requirements) -> frozenset[str]:
    return frozenset(o.subject for o in obstacles(node, requirements) if o.rule is Rule.AVAILABLE)


def _choose_node(state: State, requirements: Requirements) -> NodeInfo | None:
    """Return the node that is nearest to fitting and that ending tasks can make fit."""
    usable = [
        node
        for node in state.nodes.values()
        if node.reserved_for is None and could_ever_fit(node, requirements)
    ]
    for node in sorted(usable, key=lambda node: (_deficit(node, requirements), node.node_id)):
        trial = node.copy()
        for lease_id in node.leases:
            lease = state.leases[lease_id]
            if lease.kind is Kind.TASK:
                trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
        if first_obstacle(trial, requirements) is None:
            return node
    return None


def _deficit(node: NodeInfo, requirements: Requirements) -> float:
    """Return how far the node is from fitting: the sum of what is missing, as fractions of its totals."""
    missing = 0.0
    for name, count in requirements.items:
        lack = count - node.available.get(name, 0)
        if lack > 0:
            missing += lack / node.spec.total[name]
    if requirements.gpu and node.devices.choose(requirements.gpu) is None:
        free = (
            node.devices.largest_free
            if requirements.gpu < UNIT
            else node.devices.wholly_free * UNIT
        )
        missing += (requirements.gpu - free) / node.devices.total_units
    return missing
