"""Keeping a node for a demand that has waited long, so that smaller ones cannot starve it.

Only what the demand lacks there is kept (a node whose GPU is awaited still takes CPU work), only
where ending tasks can make it fit, for a bounded time, and for a few demands at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lifecycle import unreserve
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.feasibility import (
    Rule,
    could_ever_fit,
    first_obstacle,
    obstacles,
)
from stoker_scheduler.core.state import Reservation, State

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import Node
    from stoker_scheduler.core.model.requirements import Need
    from stoker_scheduler.core.queueing.queue import Lane

REJOIN_S = 1.0
"""A need nobody waits for keeps its node so long: its owner may only be asking again."""
SEARCH_PAUSE_S = 1.0


def keep_reservations(state: State, waiting: Sequence[Lane]) -> None:
    """End reservations that are over, and make one for each lane that has waited too long."""
    at_s, policy = state.at_s, state.policy
    lanes = {lane.need: lane for lane in waiting}
    top = max((_priority(state, lane) for lane in waiting), default=0)
    for need in list(state.reserved):
        _review(state, need, lanes.get(need), top)
    for lane in waiting:
        if lane.need in state.reserved or len(state.reserved) >= policy.max_reserved:
            continue
        head = lane.head(at_s, policy.aging_s)
        due_s = max(head.since_s + policy.reserve_after_s, state.reserve_due_s.get(lane.need, 0.0))
        if at_s < due_s or _priority(state, lane) < top:
            continue
        if len(state.reserve_due_s) > 1000:
            state.reserve_due_s.clear()
        state.reserve_due_s[lane.need] = at_s + SEARCH_PAUSE_S
        node = _choose(state, lane.need)
        if node is not None:
            node.reserved_for, node.reserved_names = lane.need, _lacking(node, lane.need)
            state.touch(node.node_id)
            state.reserved[lane.need] = Reservation(node.node_id, at_s + policy.reserve_for_s)
            state.set_timer(at_s + policy.reserve_for_s, "cycle")


def _priority(state: State, lane: Lane) -> int:
    return lane.head(state.at_s, state.policy.aging_s).asked.priority


def _review(state: State, need: Need, lane: Lane | None, top: int) -> None:
    at_s, kept = state.at_s, state.reserved[need]
    node = state.nodes[kept.node_id]
    if lane is None:
        if kept.left_s is None:
            kept.left_s = at_s
            state.set_timer(at_s + REJOIN_S, "cycle")
        if at_s >= kept.left_s + REJOIN_S:
            unreserve(state, need)
        return
    kept.left_s = None
    if at_s >= kept.until_s:
        state.reserve_due_s[need] = at_s + state.policy.reserve_for_s
        unreserve(state, need)
    elif _priority(state, lane) < top:
        unreserve(state, need)
    else:
        names = _lacking(node, need)
        if names != node.reserved_names:
            node.reserved_names = names
            state.touch(node.node_id)


def _lacking(node: Node, need: Need) -> frozenset[str]:
    return frozenset(o.subject for o in obstacles(node, need) if o.rule is Rule.AVAILABLE)


def _choose(state: State, need: Need) -> Node | None:
    """Return the node that is nearest to fitting and that ending tasks can make fit."""
    usable = [
        node
        for node in state.nodes.values()
        if node.reserved_for is None and could_ever_fit(node, need)
    ]
    for node in sorted(usable, key=lambda node: (_deficit(node, need), node.node_id)):
        trial = node.copy()
        for lease_id in node.leases:
            lease = state.leases[lease_id]
            if lease.kind is Kind.TASK:
                trial.give(lease.need, lease.gpus, blocked=lease.blocked)
        if first_obstacle(trial, need) is None:
            return node
    return None


def _deficit(node: Node, need: Need) -> float:
    """Return how far the node is from fitting: the sum of missing parts of its totals."""
    missing = 0.0
    for name, count in need.items:
        lack = count - node.available.get(name, 0)
        if lack > 0:
            missing += lack / node.spec.total[name]
    if need.gpu and node.devices.choose(need.gpu) is None:
        free = node.devices.largest_free if need.gpu < UNIT else node.devices.wholly_free * UNIT
        missing += (need.gpu - free) / node.devices.total_units
    return missing
