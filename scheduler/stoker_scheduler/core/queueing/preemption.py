"""Preemption: the leases that owners are asked to give back, so that waiting requirements fit.

It is cooperative and kills nothing: the owner stops sending work to the lease and returns it when what
runs has finished. Idle leases are preempted at once, whatever owner has them. Busy ones only for a reason:
their account has more than its fair share while the waiting one has less, their priority is lower, or
their node is reserved for a demand that has waited long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, Preempt
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.placement.feasibility import Rule, could_ever_fit, first_obstacle
from stoker_scheduler.core.queueing.queue import Subqueue, dominant_share

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.state import State

MAX_PREEMPTIONS = 64
"""Leases for which one subqueue makes room at a time."""
_ADOPTED = ""
"""The class of leases of the leader before: unknown, so taken for any class of their requirements."""


def preempt_idle(state: State, subqueue: Subqueue, outbox: Outbox) -> None:
    """Preempt idle leases until the waiting ones fit, as far as they go.

    An owner's lease is not preempted for more of the same class: it would only request it again.
    """
    limit = _missing_preemptions(state, subqueue)
    if limit <= 0:
        return
    waiting: dict[tuple[str, str], int] = {}
    for pending in subqueue.pending():
        for key in ((pending.account, pending.request.class_key), (pending.account, _ADOPTED)):
            waiting[key] = waiting.get(key, 0) + pending.wanted
    for_others = {key: subqueue.wanted - wanted for key, wanted in waiting.items()}

    def key_of(lease: LeaseState) -> tuple[str, str]:
        same = lease.class_key or lease.requirements.vector == subqueue.requirements.vector
        return (lease.account, lease.class_key if same else "other requirements")

    def allowed(lease: LeaseState) -> bool:
        return for_others.get(key_of(lease), limit) > 0

    def chosen(lease: LeaseState) -> None:
        key = key_of(lease)
        if key in for_others:
            for_others[key] -= 1

    candidates = [state.leases[lease_id] for lease_id in state.idle]
    _preempt(
        state, subqueue.requirements, candidates, limit, outbox, allowed=allowed, chosen=chosen
    )


def preempt_busy(state: State, subqueue: Subqueue, outbox: Outbox) -> None:
    """Preempt leases in use where priority, fairness or a reservation asks for it."""
    limit = _missing_preemptions(state, subqueue)
    if limit <= 0:
        return
    candidates = [lease for lease in reversed(state.leases.values()) if _is_preemptible(lease)]
    if not candidates:
        return
    head = subqueue.head(state.at_s, state.policy.aging_s)
    reservation = state.reserved.get(subqueue.requirements)
    reserved_node = reservation.node_id if reservation is not None else ""
    due = [
        lease
        for lease in candidates
        if lease.priority < head.request.priority or lease.node_id == reserved_node
    ]
    if due:
        limit -= _preempt(state, subqueue.requirements, due, limit, outbox)
    if limit > 0:
        _preempt_for_fairness(state, subqueue, candidates, limit, outbox)


def _preempt_for_fairness(
    state: State, subqueue: Subqueue, candidates: list[LeaseState], limit: int, outbox: Outbox
) -> None:
    """Preempt what other accounts have beyond the fair share, for the account that has least."""
    waiting = dict.fromkeys(pending.account for pending in state.queue.pending())
    fair_share = 1 / len({**waiting, **state.usage})
    poorest = min(subqueue.accounts, key=state.share)
    shares = {account: state.share(account) for account in state.usage}
    own_share = shares.get(poorest, 0.0)
    lease_share = dominant_share(subqueue.requirements.units, state.capacity)
    coming = len(state.preemptions.get(subqueue.requirements, ()))
    if own_share + coming * lease_share > 0:
        missing = int((fair_share - own_share) / lease_share + 1e-9) - coming if lease_share else 0
    else:
        missing = max(1, int(fair_share / lease_share + 1e-9)) if lease_share else 1
    limit = min(limit, missing)
    if limit <= 0:
        return

    settled_s = state.at_s - state.policy.quantum_s

    def is_excess(lease: LeaseState) -> bool:
        return (
            lease.account != poorest
            and lease.granted_at_s <= settled_s
            and shares.get(lease.account, 0.0) > fair_share + 1e-9
        )

    def chosen(lease: LeaseState) -> None:
        shares[lease.account] -= dominant_share(dict(lease.allocated), state.capacity)

    _preempt(
        state, subqueue.requirements, candidates, limit, outbox, allowed=is_excess, chosen=chosen
    )


def _is_preemptible(lease: LeaseState) -> bool:
    return (
        lease.kind is Kind.TASK
        and lease.phase is Phase.HELD
        and not lease.preempted
        and not lease.blocked
    )


def _missing_preemptions(state: State, subqueue: Subqueue) -> int:
    """Return for how many more leases of the subqueue room is to be made."""
    under_way = state.preemptions.get(subqueue.requirements)
    if under_way:
        under_way = [
            victims
            for victims in under_way
            if any(lease_id in state.leases for lease_id in victims)
        ]
        if under_way:
            state.preemptions[subqueue.requirements] = under_way
        else:
            del state.preemptions[subqueue.requirements]
    return min(subqueue.wanted, MAX_PREEMPTIONS) - len(under_way or ())


def _preempt(
    state: State,
    requirements: Requirements,
    candidates: Iterable[LeaseState],
    limit: int,
    outbox: Outbox,
    *,
    allowed: Callable[[LeaseState], bool] = lambda _: True,
    chosen: Callable[[LeaseState], None] = lambda _: None,
) -> int:
    """Preempt the fewest ``candidates`` that make room for up to ``limit`` leases; count these."""
    by_node: dict[str, list[LeaseState]] = {}
    for lease in candidates:
        if not lease.preempted:
            by_node.setdefault(lease.node_id, []).append(lease)
    by_owner: dict[str, list[str]] = {}
    count = 0
    for node_id, on_node in by_node.items():
        if count == limit:
            break
        node = state.nodes[node_id]
        if not could_ever_fit(node, requirements):
            continue
        trial = _after_preemptions(state, node)
        while count < limit:
            victims = _choose_victims(trial, requirements, on_node, allowed)
            if victims is None:
                break
            count += 1
            for lease in victims:
                lease.preempted = True
                state.idle.pop(lease.lease_id, None)
                on_node.remove(lease)
                chosen(lease)
                by_owner.setdefault(lease.owner_id, []).append(lease.lease_id)
            lease_ids = dict.fromkeys(lease.lease_id for lease in victims)
            state.preemptions.setdefault(requirements, []).append(lease_ids)
    for owner_id, owned in by_owner.items():
        outbox.append(Preempt(owner_id=owner_id, lease_ids=tuple(owned)))
    return count


def _after_preemptions(state: State, node: NodeInfo) -> NodeInfo:
    """Return a copy of ``node`` as it will be when the preemptions under way are done."""
    trial = node.copy()
    for requirements, under_way in state.preemptions.items():
        for victims in under_way:
            leases = [state.leases[i] for i in victims if i in state.leases]
            if not leases or leases[0].node_id != node.node_id:
                continue
            for lease in leases:
                trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
            gpus = trial.devices.choose(requirements.gpu)
            if gpus is not None:
                trial.allocate(requirements, gpus)
    return trial


def _choose_victims(
    trial: NodeInfo,
    requirements: Requirements,
    candidates: list[LeaseState],
    allowed: Callable[[LeaseState], bool],
) -> list[LeaseState] | None:
    """Return the leases whose end lets ``requirements`` fit on ``trial``, and allocate them there.

    None, and ``trial`` as it was, if they do not suffice; also if no lease need end at all.
    """
    victims: list[LeaseState] = []
    while (obstacle := first_obstacle(trial, requirements)) is not None:
        victim = None
        if obstacle.rule is Rule.AVAILABLE:
            name = obstacle.subject
            holders = (v for v in candidates if v not in victims and v.has_allocated(name))
            victim = next((v for v in holders if allowed(v)), None)
        if victim is None:
            for lease in victims:
                trial.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)
            return None
        trial.free(victim.requirements, victim.gpus, blocked=victim.blocked)
        victims.append(victim)
    if not victims:
        return None
    trial.allocate(requirements, trial.devices.choose(requirements.gpu) or {})
    return victims
