"""Preemption: the leases that owners are asked to give back, so that waiting requirements fit.

It is cooperative: the owner stops sending work to the lease and returns it when what runs has finished.
Idle leases are preempted at once, whatever owner has them. Busy ones only for a reason: their account, or
its queue, has more than its fair share while the waiting one has less, their priority is lower in the same
queue, or their node is reserved for a demand that has waited long. Nothing is preempted for work that a
limit keeps from starting. Background leases are ended at once for any other work, and nothing for them.

A lease that is *preemptible* is also stopped: its nodelet gives the worker notice, and ends it when the
grace has passed. A placement group is stopped as a whole, with all that runs in it. So that this never goes
round in circles, each reason is an order: a lease is stopped only for a higher priority than it was granted
by in its queue; for a reservation there of a request that waited before its own did, unless its account could
claim the room back by its share; or for an account, or queue, that has no more than its part even then. It
is not stopped where the room comes only when other work ends too, which was asked for it. The room is
reserved for what it was made for; should another get it all the same, whose turn is earlier, nothing more is
stopped for that for a while, each time for twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import release, set_expiry
from stoker_scheduler.core.leases.stops import ask_back, stop_group, stop_lease
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.feasibility import (
    RESOURCE_RULES,
    could_ever_fit,
    first_obstacle,
)
from stoker_scheduler.core.queueing.claims import (
    Claim,
    Claims,
    Stopped,
    claims_by_order,
    claims_by_share,
    no_claim,
    or_background,
)
from stoker_scheduler.core.queueing.reserve import reserve_room
from stoker_scheduler.core.queueing.tenants import dominant_share
from stoker_scheduler.core.queueing.victims import (
    BusyLeases,
    Place,
    Proposal,
    by_place,
    choose_victims,
)
from stoker_scheduler.core.state import Force

if TYPE_CHECKING:
    from stoker_scheduler.core.commands import Outbox
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.queues import Account
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.queue import Subqueue
    from stoker_scheduler.core.state import State

MAX_PREEMPTIONS = 64
"""Leases for which one subqueue makes room at a time."""
COMPARED_PLACES = 16
"""Places of which the cheapest victims are compared, where some can be stopped."""
REMEMBER_CLASSES = 4096
"""Classes of work of which it is known what was stopped, of them and for them."""
_ADOPTED = ""
"""The class of leases of the leader before: unknown, so taken for any class of their requirements."""


def preempt_spare(state: State, subqueue: Subqueue, background: BusyLeases, outbox: Outbox) -> None:
    """Preempt idle leases, and end background ones, until the waiting ones fit, as far as they go.

    An owner's idle lease is not preempted for more of the same class: it would only request it again.
    """
    limit, requirements = _missing_preemptions(state, subqueue), subqueue.requirements
    if limit <= 0:
        return
    idle = [state.leases[lease_id] for lease_id in state.idle]
    looks = bool(state.background) and requirements not in state.background_checked
    if looks:
        idle = [lease for lease in idle if not lease.requirements.background]
    candidates = [*idle, *(background.leases if looks else ())]
    if not candidates:
        return
    head = subqueue.head(state.at_s, state.policy.aging_s)
    claims = or_background(head, no_claim)
    if isinstance(requirements, Gang):
        count = len(_preempt_for_gang(state, requirements, candidates, outbox, claims))
    else:
        # Whose the waiting requests are costs a look at each, and matters for idle leases alone.
        allowed, chosen = _for_others(subqueue, limit) if idle else (_anyone, _nothing)
        places = by_place(candidates, requirements)
        count = _preempt(
            state,
            requirements,
            places,
            limit,
            outbox,
            allowed=allowed,
            chosen=chosen,
            claims=claims,
        )
    if looks and not count:
        state.background_checked[requirements] = None


def _anyone(lease: LeaseState) -> bool:
    return True


def _nothing(lease: LeaseState) -> None:
    pass


def _for_others(
    subqueue: Subqueue, limit: int
) -> tuple[Callable[[LeaseState], bool], Callable[[LeaseState], None]]:
    """Return whether an idle lease may go to another account or class, and what counts that it does."""
    requirements = subqueue.requirements
    waiting: dict[tuple[Account, str], int] = {}
    for pending in subqueue.pending():
        for key in ((pending.account, pending.request.class_key), (pending.account, _ADOPTED)):
            waiting[key] = waiting.get(key, 0) + pending.wanted
    for_others = {key: subqueue.wanted - wanted for key, wanted in waiting.items()}

    def key_of(lease: LeaseState) -> tuple[Account, str]:
        same = lease.class_key or lease.requirements.vector == requirements.vector
        return (lease.account, lease.class_key if same else "other requirements")

    def allowed(lease: LeaseState) -> bool:
        return lease.requirements.background or for_others.get(key_of(lease), limit) > 0

    def chosen(lease: LeaseState) -> None:
        key = key_of(lease)
        if key in for_others:
            for_others[key] -= 1

    return allowed, chosen


def preempt_busy(state: State, subqueue: Subqueue, busy: BusyLeases, outbox: Outbox) -> int:
    """Preempt leases in use where priority, fairness or a reservation asks for it; count what it made."""
    limit, requirements = _missing_preemptions(state, subqueue), subqueue.requirements
    if limit <= 0 and not busy.asked:
        return 0
    highest: dict[str, int] = {}
    firsts = list(subqueue.firsts())
    for first in firsts:
        queue, priority = first.account.queue, first.request.priority
        highest[queue] = max(priority, highest.get(queue, priority))
    reservation = state.reserved.get(requirements)
    reserved_nodes = reservation.node_ids if reservation is not None else ()
    has_lower = busy.has_lower(highest)

    def is_due(lease: LeaseState) -> bool:
        return (
            lease.priority < highest.get(lease.account.queue, lease.priority)
            or lease.node_id in reserved_nodes
            or lease.requirements.background
        )

    head = subqueue.head(state.at_s, state.policy.aging_s)
    claims = or_background(head, claims_by_order(state, firsts, reserved_nodes, busy))
    if busy.asked and not isinstance(requirements, Gang):
        _stop_asked(state, requirements, busy.asked, subqueue.wanted, outbox, claims)
    if limit <= 0:
        return 0
    if isinstance(requirements, Gang):
        if has_lower:
            due = [lease for lease in busy.leases if is_due(lease)]
        else:
            due = [lease for node_id in reserved_nodes for lease in busy.at(state.nodes[node_id])]
        claimed = [] if due else _claimable(state, subqueue, requirements, busy)
        if not due:
            claims = or_background(head, claims_by_share(state, subqueue, busy.fair))
            claimed += [state.leases[i] for i in state.background] if claimed else []
        victims = _preempt_for_gang(state, requirements, [*due, *claimed], outbox, claims)
        for lease in victims:
            busy.fair.took(busy.fair.poorest(subqueue.accounts), lease)
        return len(victims)
    if has_lower:
        places = busy.places(requirements, is_due)
    else:
        reserved = [state.nodes[node_id] for node_id in reserved_nodes]
        places = iter([(node, busy.at(node)) for node in reserved])
    count = _preempt(state, requirements, places, limit, outbox, claims=claims)
    if limit > count:
        left = limit - count
        count += _preempt_for_fairness(state, subqueue, requirements, busy, left, outbox)
    return count


def _claimable(state: State, subqueue: Subqueue, gang: Gang, busy: BusyLeases) -> list[LeaseState]:
    """Return the leases that the poorest account of a gang can claim of others, the newest first."""
    poorest = busy.fair.poorest(subqueue.accounts)
    gang_share = dominant_share(dict(state.cost(gang)), state.capacity)
    if busy.fair.missing(poorest, gang_share, 0) < 1:
        return []
    settled_s = state.at_s - state.policy.quantum_s
    trial, found = busy.fair.copy(), []
    for lease in busy.leases:
        if lease.granted_at_s <= settled_s and trial.may_take(poorest, lease):
            trial.took(poorest, lease)
            found.append(lease)
    return found


def _preempt_for_fairness(
    state: State,
    subqueue: Subqueue,
    requirements: Requirements,
    busy: BusyLeases,
    limit: int,
    outbox: Outbox,
) -> int:
    """Preempt what others have beyond their fair share for the account that has least; count the leases."""
    fair = busy.fair
    poorest = fair.poorest(subqueue.accounts)
    lease_share = dominant_share(dict(state.cost(requirements)), state.capacity)
    coming = state.preemptions.count(requirements)
    limit = min(limit, fair.missing(poorest, lease_share, coming))
    if limit <= 0:
        return 0
    settled_s = state.at_s - state.policy.quantum_s
    excess = fair.excess()

    def is_candidate(lease: LeaseState) -> bool:
        return lease.account in excess or lease.requirements.background

    def is_excess(lease: LeaseState) -> bool:
        if lease.requirements.background:
            return True
        return lease.granted_at_s <= settled_s and fair.may_take(poorest, lease)

    def chosen(lease: LeaseState) -> None:
        fair.took(poorest, lease)

    return _preempt(
        state,
        requirements,
        busy.places(requirements, is_candidate),
        limit,
        outbox,
        allowed=is_excess,
        chosen=chosen,
        claims=or_background(
            subqueue.head(state.at_s, state.policy.aging_s),
            claims_by_share(state, subqueue, fair),
        ),
    )


def _missing_preemptions(state: State, subqueue: Subqueue) -> int:
    """Return for how many more leases of the subqueue room is to be made."""
    under_way = state.preemptions.count(subqueue.requirements)
    return min(subqueue.wanted, MAX_PREEMPTIONS) - under_way


def _preempt(
    state: State,
    requirements: Requirements,
    places: Iterator[Place],
    limit: int,
    outbox: Outbox,
    *,
    allowed: Callable[[LeaseState], bool] = _anyone,
    chosen: Callable[[LeaseState], None] = _nothing,
    claims: Claims = no_claim,
) -> int:
    """Preempt the fewest candidates at ``places`` that make room for up to ``limit`` leases; count these."""

    def yields(lease: LeaseState) -> bool:
        if lease.preempted or not allowed(lease):
            return False
        return lease.kind is Kind.TASK or claims(lease) is not None

    def propose(place: NodeInfo, trial: NodeInfo, there: list[LeaseState]) -> Proposal | None:
        victims = choose_victims(trial, requirements, there, yields, ends_with=ends_with)
        if victims is None:
            return None
        seen = state.preemptions.count_at(place)
        return Proposal(place, trial, _with_gangs(state, victims), victims, there, seen)

    ends_with = partial(_rest_of_gang, state, {})
    preempted: list[LeaseState] = []
    stopped: list[Stopped] = []
    room: list[str] = []
    count = 0
    compared = COMPARED_PLACES if state.preemptible else 1
    proposals: list[Proposal] = []
    while count < limit:
        while len(proposals) < compared and (entry := next(places, None)) is not None:
            place, there = entry
            if could_ever_fit(place, requirements):
                proposal = propose(place, state.preemptions.after(place), there)
                proposals += [proposal] if proposal is not None else []
        if not proposals:
            break
        best = min(proposals, key=lambda one: one.cost) if compared > 1 else proposals[0]
        proposals.remove(best)
        place, trial, there = best.place, best.trial, best.candidates
        as_seen = state.preemptions.count_at(place) == best.seen
        if as_seen and all(yields(lease) for lease in best.chosen):
            makes_room = ((place, requirements),)
            stoppable = _stoppable(state, best.victims, claims, makes_room, stopped)
            if not stoppable and any(lease.kind is not Kind.TASK for lease in best.victims):
                continue
            count += 1
            for lease in best.victims:
                chosen(lease)
            _begin(state, requirements, best.victims, makes_room)
            preempted += best.victims
            stopped += stoppable
            room += [] if place.bundle_lease_id or not stoppable else [place.node_id]
        else:  # what was preempted since has changed the shares, or ends here too
            trial = state.preemptions.after(place)
        there[:] = [lease for lease in there if not lease.preempted]
        again = propose(place, trial, there)
        proposals[:0] = [again] if again is not None else []
    ask_back(preempted, outbox)
    _stop(state, requirements, stopped, outbox, room)
    return count


def _preempt_for_gang(
    state: State,
    gang: Gang,
    candidates: Iterable[LeaseState],
    outbox: Outbox,
    claims: Claims = no_claim,
) -> list[LeaseState]:
    """Preempt ``candidates`` on the nodes where a gang would be placed without any of them; return these."""
    on_node: dict[str, list[LeaseState]] = {}
    for lease in candidates:
        yields = lease.kind is Kind.TASK or claims(lease) is not None
        if yields and not lease.preempted and not lease.in_bundle:
            on_node.setdefault(lease.node_id, []).append(lease)
    if not on_node:
        return []
    after = {node_id: state.preemptions.after(state.nodes[node_id]) for node_id in on_node}
    emptied = {node_id: trial.copy() for node_id, trial in after.items()}
    for node_id, leases in on_node.items():
        for lease in leases:
            emptied[node_id].free(lease.requirements, lease.gpus, blocked=lease.blocked)
    placement = state.best_placement_if(gang, emptied)
    if placement is None:
        return []
    ending: dict[str, LeaseState] = {}
    for index, node_id in placement:
        bundle = gang.bundles[index]
        if node_id not in after:
            continue
        trial = after[node_id]
        if first_obstacle(trial, bundle, RESOURCE_RULES) is None:
            trial.allocate(bundle, trial.choose(bundle) or {})
            continue
        there = [lease for lease in on_node[node_id] if lease.lease_id not in ending]
        rest = partial(_rest_of_gang, state, ending)
        chosen = choose_victims(trial, bundle, there, lambda _: True, RESOURCE_RULES, rest)
        for lease in _with_gangs(state, chosen or []):
            if lease.lease_id not in ending and lease.node_id in after and lease.node_id != node_id:
                other = after[lease.node_id]
                other.free(lease.requirements, lease.gpus, blocked=lease.blocked)
            ending[lease.lease_id] = lease
    victims = list(ending.values())
    room = tuple((state.nodes[node_id], gang.bundles[index]) for index, node_id in placement)
    stopped = _stoppable(state, victims, claims, room)
    if not stopped and any(lease.kind is not Kind.TASK for lease in victims):
        return []
    if victims:
        _begin(state, gang, victims, room)
        ask_back(victims, outbox)
        _stop(state, gang, stopped, outbox, [node_id for _, node_id in placement])
    return victims


def _rest_of_gang(
    state: State, ending: Mapping[str, LeaseState], lease: LeaseState
) -> list[LeaseState]:
    """Return the other bundles of a bundle's gang at its place, which end with it; not those ``ending``."""
    if lease.kind is not Kind.BUNDLE:
        return []
    bundles = state.groups[lease.group_id].bundles.values()
    rest = [state.leases[place.bundle_lease_id] for place in bundles]
    return [
        one
        for one in rest
        if one is not lease
        and one.place is lease.place
        and not one.preempted
        and one.lease_id not in ending
    ]


def _with_gangs(state: State, victims: list[LeaseState]) -> list[LeaseState]:
    """Return ``victims`` with the other bundles of those that are of a gang: it ends whole or not at all."""
    groups = [lease.group_id for lease in victims if lease.kind is Kind.BUNDLE]
    bundles = [
        state.leases[place.bundle_lease_id]
        for group_id in dict.fromkeys(groups)
        for place in state.groups[group_id].bundles.values()
    ]
    return [*victims, *(bundle for bundle in bundles if bundle not in victims)]


def _begin(
    state: State,
    requirements: Requirements | Gang,
    victims: list[LeaseState],
    makes_room: tuple[tuple[NodeInfo, Requirements], ...],
) -> None:
    for lease in victims:
        lease.preempted = True
        if lease.idle:
            # Its owner may be busy or stopped, and not give back what it does not use.
            set_expiry(state, lease, state.policy.lease_ttl_s)
        state.idle.pop(lease.lease_id, None)
    state.preemptions.begin(requirements, victims, makes_room)


def _stoppable(
    state: State,
    victims: list[LeaseState],
    claims: Claims,
    makes_room: tuple[tuple[NodeInfo, Requirements], ...],
    before: Sequence[Stopped] = (),
) -> list[Stopped]:
    """Return those of ``victims`` that may be stopped, and why; none if the room does not come by that alone.

    What was found ``before`` is stopped with them. Nobody knows when work ends that its owner is only
    asked for: what is stopped before that may be stopped in vain.
    """
    stopped = [(lease, claim) for lease in victims if (claim := claims(lease)) is not None]
    lease_ids = {lease.lease_id for lease, _ in (*before, *stopped)}
    groups = {lease.group_id for lease, _ in (*before, *stopped) if lease.kind is Kind.BUNDLE}

    def ends(lease: LeaseState) -> bool:
        with_gang = lease.kind is Kind.BUNDLE and lease.group_id in groups
        return with_gang or lease.lease_id in lease_ids or _is_ending(state, lease)

    trials: dict[tuple[str, str], NodeInfo] = {}
    for place, requirements in makes_room if stopped else ():
        key = (place.node_id, place.bundle_lease_id)
        if key not in trials:
            trial = trials[key] = state.preemptions.after(place, ends)
            for lease in victims:
                if lease.place is place and ends(lease) and not lease.preempted:
                    trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
        trial = trials[key]
        if first_obstacle(trial, requirements, RESOURCE_RULES) is not None:
            return []
        trial.allocate(requirements, trial.choose(requirements) or {})
    return stopped


def _is_ending(state: State, lease: LeaseState) -> bool:
    """Return whether a lease that is preempted ends soon: it is stopped, or nothing runs in it."""
    if lease.phase is not Phase.HELD:
        return True  # of a bundle, the group may be forgotten already
    if lease.kind is Kind.BUNDLE:
        return state.groups[lease.group_id].closing
    return bool(lease.stop_reason) or lease.idle


def _stop(
    state: State,
    requirements: Requirements | Gang,
    stopped: list[Stopped],
    outbox: Outbox,
    room: Iterable[str],
) -> None:
    """Have the nodelets end leases; reserve the nodes with the ``room`` that this makes."""
    policy = state.policy
    if not stopped:
        return
    until_s = state.at_s
    for lease, claim in stopped:
        grace_s = state.grace_s(lease)
        until_s = max(until_s, state.at_s + grace_s + policy.stop_margin_s)
        key = (lease.account, lease.class_key)
        state.preempted[key] = state.preempted.pop(key, 0) + 1
        _forget_oldest(state.preempted)
        if lease.phase is not Phase.HELD:
            reason = f"its room is for {claim.text}"
            release(state, lease, outbox, kill=True, reason=reason, notify=False)
        elif lease.kind is Kind.BUNDLE:
            reason_of = partial(_reason, claim)
            stop_group(state, state.groups[lease.group_id], reason_of, grace_s, outbox)
        else:
            stop_lease(state, lease, _reason(claim, lease), grace_s, outbox)
    # What is background work claims nothing back.
    served = [claim.pending for lease, claim in stopped if not lease.requirements.background]
    for key in {(pending.account, pending.request.class_key): None for pending in served}:
        known = state.forced.pop(key, None)
        times = known.times + 1 if known is not None and state.at_s >= known.until_s else 0
        state.forced[key] = Force(until_s + policy.aging_s * 2.0**times, min(times, 16))
        _forget_oldest(state.forced)
    reserve_room(state, requirements, room, until_s)


def _reason(claim: Claim, lease: LeaseState) -> str:
    where = "" if lease.kind is Kind.BUNDLE else f" on node {lease.node_id}"
    return f"preempted{where} for {claim.text}"


def _stop_asked(
    state: State,
    requirements: Requirements,
    asked: Iterable[LeaseState],
    limit: int,
    outbox: Outbox,
    claims: Claims,
) -> None:
    """Stop leases that were only asked for until now, where this makes room for up to ``limit`` leases."""
    places: dict[tuple[str, str], Place] = {}
    for lease in asked:
        if not lease.stop_reason and lease.group_id == requirements.group_id and claims(lease):
            key = (lease.place.node_id, lease.place.bundle_lease_id)
            places.setdefault(key, (lease.place, []))[1].append(lease)
    for place, there in places.values():
        trial = state.preemptions.after(place, partial(_is_ending, state))
        while limit and (victims := choose_victims(trial, requirements, there, _anyone)):
            limit -= 1
            stopped = [(lease, claim) for lease in victims if (claim := claims(lease)) is not None]
            _stop(state, requirements, stopped, outbox, [place.node_id])
            there = [lease for lease in there if lease not in victims]


def _forget_oldest(remembered: dict[tuple[Account, str], Any]) -> None:
    if len(remembered) > REMEMBER_CLASSES:
        del remembered[next(iter(remembered))]
