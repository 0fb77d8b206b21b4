"""Reservations: nodes reserved for a demand that has waited long, so that smaller ones cannot starve it.

Only what the demand lacks there is reserved (a node whose GPU is awaited still takes CPU work; of the nodes
for a gang, what it asks for of each), only where ending tasks can make it fit, for a bounded time, and for a
few demands at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lifecycle import cancel_reservation
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.feasibility import (
    Rule,
    could_ever_fit,
    first_obstacle,
    obstacles,
)
from stoker_scheduler.core.placement.gang import GangPlacement, GangRanking
from stoker_scheduler.core.placement.ranking import DirtyNodes
from stoker_scheduler.core.queueing.policies import by_priority
from stoker_scheduler.core.state import Reservation, State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.policies import Key
    from stoker_scheduler.core.queueing.queue import PendingRequest, Subqueue

UNWANTED_GRACE_S = 1.0
"""A reservation outlives its last waiting request by this: the owner may only be repeating it."""
SEARCH_PAUSE_S = 1.0
MIN_TRIED, TRIED_PER_BUNDLE = 64, 4
"""Nodes among which those for a gang are chosen first: so many, and so many for each bundle."""


def update_reservations(state: State, waiting: Sequence[Subqueue]) -> float:
    """End reservations that are over, and make one for each subqueue that has waited too long.

    Return when the next has waited so long, if nothing else changes.
    """
    next_due_s = math.inf
    at_s, policy = state.at_s, state.policy
    heads = {subqueue.requirements: _head(state, subqueue) for subqueue in waiting}
    foremost = _foremost(state, heads.values())
    for requirements in list(state.reserved):
        _review_reservation(state, requirements, heads.get(requirements), foremost)
    for subqueue in waiting:
        requirements = subqueue.requirements
        if requirements in state.reserved or len(state.reserved) >= policy.max_reserved:
            continue
        head = heads[requirements]
        due_s = max(
            head.since_s + policy.reserve_after_s, state.reserve_due_s.get(requirements, 0.0)
        )
        if at_s < due_s:
            next_due_s = min(next_due_s, due_s)
        if at_s < due_s or head.request_id not in foremost:
            continue
        if len(state.reserve_due_s) > 1000:
            state.reserve_due_s.clear()
        state.reserve_due_s[requirements] = at_s + SEARCH_PAUSE_S
        names = _choose_nodes(state, requirements)
        if names:
            for node_id in names:
                state.nodes[node_id].reserved_for = requirements
            state.reserved[requirements] = Reservation(tuple(names), at_s + policy.reserve_for_s)
            _reserve_names(state, names)
            state.set_timer(at_s + policy.reserve_for_s, Timer.CYCLE)
    return next_due_s


def reserve_room(
    state: State, requirements: Requirements | Gang, node_ids: Iterable[str], until_s: float
) -> None:
    """Reserve the nodes where work is stopped for ``requirements``, so that no other takes the room.

    Besides those that are reserved for them already.
    """
    free = [i for i in dict.fromkeys(node_ids) if state.nodes[i].reserved_for is None]
    if not free:
        return
    names = _names_of(state, requirements, free)
    for node_id in free:
        state.nodes[node_id].reserved_for = requirements
    known = state.reserved.get(requirements, Reservation((), until_s))
    node_ids, until_s = (*known.node_ids, *free), max(known.until_s, until_s)
    state.reserved[requirements] = Reservation(node_ids, until_s)
    _reserve_names(state, names)
    state.set_timer(until_s, Timer.CYCLE)


def _head(state: State, subqueue: Subqueue) -> PendingRequest:
    """Return the request of a subqueue that its policy serves first."""
    tenants = state.tenants
    queues = {} if tenants.only_priority else {account.queue for account in subqueue.accounts}
    if all(tenants.policy(queue) is by_priority for queue in queues):
        return subqueue.head(state.at_s, state.policy.aging_s)
    return min(subqueue.firsts(), key=lambda p: (_order(state, p), p.seq))


def _order(state: State, pending: PendingRequest) -> Key:
    order = state.tenants.policy(pending.account.queue)
    return order(pending, 0.0, state.at_s, state.policy.aging_s)


def _foremost(state: State, heads: Iterable[PendingRequest]) -> dict[str, None]:
    """Return the requests that nodes may be reserved for: of each queue, those that its policy puts first.

    Where priority decides, all of the highest one; age has made them wait for a reservation already.
    """
    by_queue: dict[str, list[PendingRequest]] = {}
    for head in heads:
        by_queue.setdefault(head.account.queue, []).append(head)
    foremost: dict[str, None] = {}
    for queue, members in by_queue.items():
        if state.tenants.policy(queue) is by_priority:
            top = max(head.request.priority for head in members)
            first = [head for head in members if head.request.priority == top]
        else:
            first = [min(members, key=lambda head: (_order(state, head), head.seq))]
        foremost.update(dict.fromkeys(head.request_id for head in first))
    return foremost


def _review_reservation(
    state: State,
    requirements: Requirements | Gang,
    head: PendingRequest | None,
    foremost: Mapping[str, None],
) -> None:
    at_s, reservation = state.at_s, state.reserved[requirements]
    if head is None:
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
    elif head.request_id not in foremost:
        cancel_reservation(state, requirements)
    elif not isinstance(requirements, Gang):
        _reserve_names(state, _names_of(state, requirements, reservation.node_ids))


def _reserve_names(state: State, names: Mapping[str, frozenset[str]]) -> None:
    for node_id, missing in names.items():
        node = state.nodes[node_id]
        if missing != node.reserved_names:
            node.reserved_names = missing
            state.mark_dirty(node_id)


def _names_of(
    state: State, requirements: Requirements | Gang, node_ids: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return the resources that ``requirements`` lack on each node; of a gang, all that it asks for."""
    if isinstance(requirements, Gang):
        return dict.fromkeys(node_ids, requirements.names)
    names = {}
    for node_id in node_ids:
        lacks = obstacles(state.nodes[node_id], requirements)
        names[node_id] = frozenset(o.subject for o in lacks if o.rule is Rule.AVAILABLE)
        if any(o.rule is Rule.FILTER_NOW for o in lacks):
            names[node_id] |= requirements.reads
    return names


def _choose_nodes(state: State, requirements: Requirements | Gang) -> dict[str, frozenset[str]]:
    """Return the nodes to reserve, and what to reserve on each; none if ending tasks make nothing fit."""
    if isinstance(requirements, Gang):
        return _choose_for_gang(state, requirements)
    node = _choose_node(state, requirements)
    return {} if node is None else _names_of(state, requirements, (node.node_id,))


def _choose_for_gang(state: State, gang: Gang) -> dict[str, frozenset[str]]:
    """Choose among the nodes that are nearest to fitting; among all, if these do not suffice."""
    usable = [node for node in state.nodes.values() if node.reserved_for is None]
    most = max(MIN_TRIED, TRIED_PER_BUNDLE * len(gang.bundles))
    nearest = [node for kind in gang.kinds for node in islice(_nearest(usable, kind), most)]
    placement = _place_without_tasks(state, gang, nearest)
    if placement is None and len(usable) > most:
        placement = _place_without_tasks(state, gang, usable)
    names: dict[str, frozenset[str]] = {}
    for index, node_id in placement or ():
        names[node_id] = names.get(node_id, frozenset()) | gang.bundles[index].names
    return names


def _place_without_tasks(
    state: State, gang: Gang, nodes: Iterable[NodeInfo]
) -> GangPlacement | None:
    trials = {node.node_id: _without_tasks(state, node) for node in nodes}
    return GangRanking(gang).best(trials, DirtyNodes(), state.policy.score)


def _without_tasks(state: State, node: NodeInfo) -> NodeInfo:
    """Return a copy of ``node`` as it will be when the tasks that it runs have ended."""
    trial = node.copy()
    for lease_id in node.leases:
        lease = state.leases[lease_id]
        if lease.kind is Kind.TASK:
            trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
    return trial


def _choose_node(state: State, requirements: Requirements) -> NodeInfo | None:
    """Return the node that is nearest to fitting and that ending tasks can make fit."""
    if requirements.group_id:
        return None  # nothing but the group's own work is in its bundles
    usable = [node for node in state.nodes.values() if node.reserved_for is None]
    for node in _nearest(usable, requirements):
        if first_obstacle(_without_tasks(state, node), requirements) is None:
            return node
    return None


def _nearest(nodes: Iterable[NodeInfo], requirements: Requirements) -> Iterator[NodeInfo]:
    """Yield the nodes that could ever fit, those that are nearest to fitting first."""
    ranked = sorted(nodes, key=lambda node: (_deficit(node, requirements), node.node_id))
    return (node for node in ranked if could_ever_fit(node, requirements))


def _deficit(node: NodeInfo, requirements: Requirements) -> float:
    """Return how far the node is from fitting: the sum of what is missing, as fractions of its totals."""
    missing = 0.0
    for name, count in requirements.items:
        lack = count - node.available.get(name, 0)
        if lack > 0:
            missing += lack / (node.spec.total.get(name, 0) or 1)
    devices, units, nbytes = node.devices, requirements.gpu, requirements.gpu_memory
    if not requirements.needs_gpu or devices.can_serve(units, nbytes):
        return missing
    if nbytes:
        return missing + (nbytes - devices.largest_free_bytes) / nbytes
    free = devices.largest_free if units < UNIT else devices.wholly_free * UNIT
    return missing + (units - free) / (devices.total_units or 1)
