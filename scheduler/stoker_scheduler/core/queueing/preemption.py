"""Making room: which leases their owners are asked to give back, so that a waiting need fits.

Idle leases are recalled at once, whoever holds them. Busy ones only for a reason: their owner holds
more than its fair part while the waiting one holds less, their priority is lower, or their node is
kept for a demand that has waited long. A recall kills nothing: the owner stops sending work there
and returns the lease when what runs has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Command, Recall
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.placement.feasibility import Rule, could_ever_fit, first_obstacle
from stoker_scheduler.core.queueing.queue import Lane, dominant_share
from stoker_scheduler.core.state import LeaseState, Phase, State

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import Node
    from stoker_scheduler.core.model.requirements import Need

MAX_UNITS = 64
"""Leases for which one lane makes room at a time."""
_ADOPTED = ""
"""The class of leases of the leader before: unknown, so taken for any class of their need."""


def recall_idle(state: State, lane: Lane, out: list[Command]) -> None:
    """Recall idle leases until the waiting ones fit, as far as they go.

    An owner's lease is not recalled for more of the same class: it would only ask for it again.
    """
    limit = _units_missing(state, lane)
    if limit <= 0:
        return
    waiting: dict[tuple[str, str], int] = {}
    for ask in lane.asks():
        for key in ((ask.account, ask.asked.class_key), (ask.account, _ADOPTED)):
            waiting[key] = waiting.get(key, 0) + ask.wanted
    for_others = {key: lane.wanted - wanted for key, wanted in waiting.items()}

    def key_of(lease: LeaseState) -> tuple[str, str]:
        same = lease.class_key or lease.need.vector == lane.need.vector
        return (lease.account, lease.class_key if same else "another need")

    def allowed(lease: LeaseState) -> bool:
        return for_others.get(key_of(lease), limit) > 0

    def chosen(lease: LeaseState) -> None:
        key = key_of(lease)
        if key in for_others:
            for_others[key] -= 1

    victims = [state.leases[lease_id] for lease_id in state.idle]
    _recall(state, lane.need, victims, limit, out, allowed=allowed, chosen=chosen)


def recall_busy(state: State, lane: Lane, out: list[Command]) -> None:
    """Recall leases in use where priority, fairness or a reservation asks for it."""
    limit = _units_missing(state, lane)
    if limit <= 0:
        return
    victims = [lease for lease in reversed(state.leases.values()) if _may_be_recalled(lease)]
    if not victims:
        return
    head = lane.head(state.at_s, state.policy.aging_s)
    kept = state.reserved.get(lane.need)
    kept_node = kept.node_id if kept is not None else ""
    due = [
        lease
        for lease in victims
        if lease.priority < head.asked.priority or lease.node_id == kept_node
    ]
    if due:
        limit -= _recall(state, lane.need, due, limit, out)
    if limit > 0:
        _recall_excess(state, lane, victims, limit, out)


def _recall_excess(
    state: State, lane: Lane, victims: list[LeaseState], limit: int, out: list[Command]
) -> None:
    """Recall what other accounts hold beyond their part, for the account that holds least."""
    waiting = dict.fromkeys(ask.account for ask in state.queue.asks())
    parts = len({**waiting, **state.usage})
    asker = min(lane.accounts, key=state.share)
    shares = {account: state.share(account) for account in state.usage}
    part, mine = 1 / parts, shares.get(asker, 0.0)
    one = dominant_share(lane.need.units, state.capacity)
    coming = len(state.recalls.get(lane.need, ()))
    if mine + coming * one > 0:
        limit = min(limit, int((part - mine) / one + 1e-9) - coming if one else 0)
    else:
        limit = min(limit, max(1, int(part / one + 1e-9)) if one else 1)
    if limit <= 0:
        return

    settled_s = state.at_s - state.policy.quantum_s

    def is_excess(lease: LeaseState) -> bool:
        return (
            lease.account != asker
            and lease.granted_at_s <= settled_s
            and shares.get(lease.account, 0.0) > part + 1e-9
        )

    def chosen(lease: LeaseState) -> None:
        shares[lease.account] -= dominant_share(dict(lease.held), state.capacity)

    _recall(state, lane.need, victims, limit, out, allowed=is_excess, chosen=chosen)


def _may_be_recalled(lease: LeaseState) -> bool:
    return (
        lease.kind is Kind.TASK
        and lease.phase is Phase.HELD
        and not lease.recalled
        and not lease.blocked
    )


def _units_missing(state: State, lane: Lane) -> int:
    """Return for how many more leases of the lane room is to be made."""
    under_way = state.recalls.get(lane.need)
    if under_way:
        under_way = [unit for unit in under_way if any(i in state.leases for i in unit)]
        if under_way:
            state.recalls[lane.need] = under_way
        else:
            del state.recalls[lane.need]
    return min(lane.wanted, MAX_UNITS) - len(under_way or ())


def _recall(
    state: State,
    need: Need,
    victims: Iterable[LeaseState],
    limit: int,
    out: list[Command],
    *,
    allowed: Callable[[LeaseState], bool] = lambda _: True,
    chosen: Callable[[LeaseState], None] = lambda _: None,
) -> int:
    """Recall the fewest ``victims`` that make room for up to ``limit`` of ``need``; count them."""
    by_node: dict[str, list[LeaseState]] = {}
    for lease in victims:
        if not lease.recalled:
            by_node.setdefault(lease.node_id, []).append(lease)
    orders: dict[str, list[str]] = {}
    units = 0
    for node_id, there in by_node.items():
        if units == limit:
            break
        node = state.nodes[node_id]
        if not could_ever_fit(node, need):
            continue
        trial = _after_recalls(state, node)
        while units < limit:
            unit = _make_room(trial, need, there, allowed)
            if unit is None:
                break
            units += 1
            for lease in unit:
                lease.recalled = True
                state.idle.pop(lease.lease_id, None)
                there.remove(lease)
                chosen(lease)
                orders.setdefault(lease.owner_id, []).append(lease.lease_id)
            names = dict.fromkeys(lease.lease_id for lease in unit)
            state.recalls.setdefault(need, []).append(names)
    for owner_id, lease_ids in orders.items():
        out.append(Recall(owner_id=owner_id, lease_ids=tuple(lease_ids)))
    return units


def _after_recalls(state: State, node: Node) -> Node:
    """Return a copy of ``node`` as it will be when the recalls under way are done."""
    trial = node.copy()
    for need, units in state.recalls.items():
        for unit in units:
            leases = [state.leases[i] for i in unit if i in state.leases]
            if not leases or leases[0].node_id != node.node_id:
                continue
            for lease in leases:
                trial.give(lease.need, lease.gpus, blocked=lease.blocked)
            gpus = trial.devices.choose(need.gpu)
            if gpus is not None:
                trial.take(need, gpus)
    return trial


def _make_room(
    trial: Node,
    need: Need,
    victims: list[LeaseState],
    allowed: Callable[[LeaseState], bool],
) -> list[LeaseState] | None:
    """Return the victims whose end lets ``need`` fit on ``trial``, which then holds it.

    None, and ``trial`` as it was, if they do not suffice; also if they are not needed at all.
    """
    unit: list[LeaseState] = []
    while (obstacle := first_obstacle(trial, need)) is not None:
        victim = None
        if obstacle.rule is Rule.AVAILABLE:
            subject = obstacle.subject
            holders = (v for v in victims if v not in unit and v.holds(subject))
            victim = next((v for v in holders if allowed(v)), None)
        if victim is None:
            for lease in unit:
                trial.take(lease.need, lease.gpus, blocked=lease.blocked)
            return None
        trial.give(victim.need, victim.gpus, blocked=victim.blocked)
        unit.append(victim)
    if not unit:
        return None
    trial.take(need, trial.devices.choose(need.gpu) or {})
    return unit
