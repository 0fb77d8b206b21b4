"""One scheduling cycle: assign what fits, reject what never will, preempt and reserve for the rest.

Run by ``machine`` after every event. It looks at the subqueues that are new and at those that the event may
have helped; a subqueue whose requirements fit nowhere costs one look, however many requests wait in it, and
then nothing until something changes for it. Now and then all that wait are reviewed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, RejectReason
from stoker_scheduler.core.leases.lifecycle import assign, assign_gang, reject
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.explain import infeasible_text
from stoker_scheduler.core.placement.feasibility import could_be_in_bundle, could_ever_fit
from stoker_scheduler.core.placement.gang import could_ever_be_placed
from stoker_scheduler.core.placement.lost_nodes import awaited
from stoker_scheduler.core.queueing.preemption import preempt_busy, preempt_spare
from stoker_scheduler.core.queueing.queue import PendingRequest, Subqueue, WaitingRequests
from stoker_scheduler.core.queueing.reserve import update_reservations
from stoker_scheduler.core.queueing.turns import Candidate, Turns
from stoker_scheduler.core.queueing.victims import BusyLeases
from stoker_scheduler.core.state import State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.queues import Account
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.tenants import Hold

MAX_REMEMBERED_REQUIREMENTS = 4096
BATCH, BATCH_ACCOUNTS = 64, 1024
"""Subqueues among whose accounts turns are taken at once; how many accounts, if there is one queue."""
MAX_LOOKS, LEASES_PER_LOOK = 16, 16
"""Subqueues for which busy leases are looked at between two reviews, each so many leases that are then
preempted counting as one more; the others' turn comes at the next."""


def run_cycle(state: State, outbox: Outbox) -> None:
    """Bring the queue as far as the cluster allows."""
    queue = state.queue
    if not (queue.open or queue.joined or state.review_due or state.idle_grew):
        return
    if state.review_due and queue.held:
        state.wake_held()
    # 1. Assign what fits, those first whose turn it is; subqueues that fit nowhere are set aside.
    opened = queue.take_open()
    blocked = {subqueue.requirements: subqueue for subqueue in queue.take_joined()}
    for subqueues in _batches(state, opened):
        _assign_in_turns(state, subqueues, blocked, outbox)
    # 2. Those set aside, at a review all that are: never possible, or only not now?
    if state.review_due or state.idle_grew:
        blocked = {requirements: queue.subqueues[requirements] for requirements in queue.blocked}
    waiting = []
    for subqueue in blocked.values():
        if can_ever_fit(state, subqueue.requirements):
            state.infeasible_since_s.pop(subqueue.requirements, None)
            waiting.append(_startable(state, subqueue, outbox))
        else:
            _mark_infeasible(state, subqueue, outbox)
    # 3. Make room.
    _preempt_and_reserve(state, [subqueue for subqueue in waiting if subqueue.accounts], outbox)
    state.review_due = state.idle_grew = False
    if queue.open:
        # What was assigned ended a reservation, and with it what others waited for.
        run_cycle(state, outbox)


def assign_at_once(state: State, pending: PendingRequest, most: int, outbox: Outbox) -> int:
    """Assign up to ``most`` leases of a new request as :func:`run_cycle` would; return how many.

    None if there is something to choose between. A request for which there is room need not queue.
    """
    requirements, queue = pending.requirements, state.queue
    if queue.open or requirements in queue.subqueues or not state.tenants.is_plain:
        return 0
    if isinstance(requirements, Gang):
        return 0
    count = 0
    while count < most and (place := state.best_place(requirements, pending)) is not None:
        assign(state, pending, requirements, place, outbox)
        count += 1
    return count


def _batches(state: State, subqueues: list[Subqueue]) -> list[list[Subqueue]]:
    """Return the subqueues, those of background work last; of many those with the foremost requests first.

    What the first batch leaves free is all that the next ones can have: turns within each suffice, if each
    has the foremost of all queues.
    """
    background = [one for one in subqueues if one.requirements.background]
    if background and len(background) < len(subqueues):
        others = [one for one in subqueues if not one.requirements.background]
        return [*_batches(state, others), *_batches(state, background)]
    is_plain = state.tenants.is_plain
    if len(subqueues) <= BATCH and (
        not is_plain or sum(len(one.accounts) for one in subqueues) <= BATCH_ACCOUNTS
    ):
        return [subqueues]
    at_s, aging_s = state.at_s, state.policy.aging_s

    def foremost(subqueue: Subqueue) -> tuple[int, float, int]:
        head = subqueue.head(at_s, aging_s)
        return -head.effective_priority(at_s, aging_s), head.since_s, head.seq

    ordered = sorted(subqueues, key=foremost)
    if not is_plain:
        ordered = _alternated(ordered)
    batches: list[list[Subqueue]] = [[]]
    accounts = 0
    for subqueue in ordered:
        accounts += len(subqueue.accounts) if is_plain else 0
        if batches[-1] and (len(batches[-1]) == BATCH or accounts > BATCH_ACCOUNTS):
            batches.append([])
            accounts = len(subqueue.accounts)
        batches[-1].append(subqueue)
    return batches


def _alternated(subqueues: list[Subqueue]) -> list[Subqueue]:
    """Return the first of each queue, then the second of each, and so on."""
    counts: dict[str, int] = {}
    positions: list[int] = []
    for subqueue in subqueues:
        queues = {account.queue: None for account in subqueue.accounts}
        positions.append(min(counts.get(queue, 0) for queue in queues))
        for queue in queues:
            counts[queue] = counts.get(queue, 0) + 1
    order = sorted(range(len(subqueues)), key=positions.__getitem__)
    return [subqueues[index] for index in order]


def _assign_in_turns(
    state: State,
    subqueues: list[Subqueue],
    blocked: dict[Requirements | Gang, Subqueue],
    outbox: Outbox,
) -> None:
    """Assign one lease at a time, so that queues and accounts take turns, until nothing more fits."""
    candidates = _candidates(state, subqueues, blocked)
    fair = len({candidate.pending.account for candidate in candidates}) > 1
    turns = Turns(state.tenants, state.at_s, candidates)
    while (candidate := turns.pop()) is not None:
        pending = candidate.pending
        requirements = pending.requirements
        if requirements in blocked:
            continue
        hold = state.hold(pending.account, requirements)
        if hold is not None:
            _hold(state, pending, hold, outbox)
        elif not _assign(state, pending, outbox):
            blocked[requirements] = state.queue.subqueues[requirements]
            state.queue.block(blocked[requirements])
        elif candidate.waiting:
            turns.push(_candidate(state, candidate.waiting, fair))


def _assign(state: State, pending: PendingRequest, outbox: Outbox) -> bool:
    """Assign one lease, or all bundles of a gang; return whether there was room."""
    requirements = pending.requirements
    if isinstance(requirements, Gang):
        placement = state.best_placement(requirements)
        if placement is not None:
            assign_gang(state, pending, requirements, placement, outbox)
        return placement is not None
    place = state.best_place(requirements, pending)
    if place is not None:
        assign(state, pending, requirements, place, outbox)
        state.queue.want(pending, pending.wanted - 1)
    return place is not None


def _hold(state: State, pending: PendingRequest, hold: Hold, outbox: Outbox) -> None:
    """Set the requests of an account aside that a limit holds."""
    state.queue.hold(pending, hold)
    state.set_rate_timer(hold)
    if hold.is_final:
        waiting = state.queue.subqueues[pending.requirements].accounts[pending.account]
        _reject_final(state, waiting, hold, outbox)


def _reject_final(state: State, waiting: WaitingRequests, hold: Hold, outbox: Outbox) -> None:
    """Reject what is more than a limit by itself, unless it is to wait for another limit."""
    for pending in list(waiting):
        if not pending.request.wait_if_infeasible:
            text = f"{pending.requirements.text} can never start: {hold.text}\n{hold.remedy}"
            reject(state, pending, RejectReason.INFEASIBLE, text, outbox)


def _startable(state: State, subqueue: Subqueue, outbox: Outbox) -> Subqueue:
    """Return the part of a subqueue that no limit keeps from starting."""
    requirements = subqueue.requirements
    if state.tenants.is_plain or (not isinstance(requirements, Gang) and requirements.group_id):
        return subqueue
    accounts: dict[Account, WaitingRequests] = {}
    for account, waiting in list(subqueue.accounts.items()):
        hold = state.hold(account, requirements)
        if hold is None:
            accounts[account] = waiting
        elif hold.is_final:
            _reject_final(state, waiting, hold, outbox)
    wanted = {account: waiting.wanted for account, waiting in accounts.items()}
    return Subqueue(
        requirements, accounts, state.tenants.startable(wanted, state.cost(requirements))
    )


def _preempt_and_reserve(state: State, waiting: list[Subqueue], outbox: Outbox) -> None:
    """Preempt idle and background leases at once; look at busy ones at reviews, and for each new subqueue.

    Background work waits for room that is left over.
    """
    others = [subqueue for subqueue in waiting if not subqueue.requirements.background]
    if state.review_due and state.at_s >= state.preemption_due_s:
        state.preemption_due_s = state.at_s + state.policy.preemption_pause_s
        state.looks = 0
        state.background_checked.clear()
        if all(subqueue.requirements in state.preemption_checked for subqueue in others):
            state.preemption_checked.clear()
        due_s = update_reservations(state, others)
        if due_s < math.inf:
            state.set_review(due_s)
    elif state.review_due and others:
        state.set_review(state.preemption_due_s)
    background = BusyLeases(state, state.background)
    for subqueue in others if state.idle or state.background else ():
        preempt_spare(state, subqueue, background, outbox)
    busy = BusyLeases(state)
    unchecked = [one for one in others if one.requirements not in state.preemption_checked]
    # Those that were looked at longest ago, so that those which ask for it often do not hold up others.
    unchecked.sort(key=lambda one: state.last_looks.get(one.requirements, 0))
    for subqueue in unchecked:
        if state.looks >= MAX_LOOKS:
            break
        state.preemption_checked[subqueue.requirements] = None
        state.note_look(subqueue.requirements)
        state.looks += 1 + preempt_busy(state, subqueue, busy, outbox) // LEASES_PER_LOOK
    if any(one.requirements not in state.preemption_checked for one in unchecked):
        state.set_review(state.at_s + state.policy.preemption_pause_s)


def _candidates(
    state: State, subqueues: list[Subqueue], blocked: dict[Requirements | Gang, Subqueue]
) -> list[Candidate]:
    candidates: list[Candidate] = []
    fair = len(subqueues) > 1 or any(len(one.accounts) > 1 for one in subqueues)
    for subqueue in subqueues:
        if not state.fits(subqueue.requirements):
            blocked[subqueue.requirements] = subqueue
            state.queue.block(subqueue)
            continue
        accounts = subqueue.accounts.values()
        candidates += [_candidate(state, waiting, fair) for waiting in accounts]
    return candidates


def _candidate(state: State, waiting: WaitingRequests, fair: bool) -> Candidate:
    """Return the next of an account's requests in a subqueue, by the policy of its queue."""
    firsts = waiting.firsts
    account = firsts[0].account
    order, share = state.tenants.policy(account.queue), state.share(account) if fair else 0.0
    at_s, aging_s = state.at_s, state.policy.aging_s
    candidates = [Candidate(order(p, share, at_s, aging_s), p.seq, p, waiting) for p in firsts]
    return min(candidates) if len(candidates) > 1 else candidates[0]


def can_ever_fit(state: State, requirements: Requirements | Gang) -> bool:
    """Return whether the nodes there are could take ``requirements`` if they were idle."""
    if not isinstance(requirements, Gang) and requirements.group_id:
        group = state.groups.get(requirements.group_id)
        return group is not None and could_be_in_bundle(group, requirements)
    answer = state.feasible.get(requirements)
    if answer is None:
        if len(state.feasible) >= MAX_REMEMBERED_REQUIREMENTS:
            state.feasible.clear()
        if isinstance(requirements, Gang):
            answer = could_ever_be_placed(state.nodes, requirements, state.policy.score)
        else:
            answer = any(could_ever_fit(node, requirements) for node in state.nodes.values())
        state.feasible[requirements] = answer
    return answer


def _mark_infeasible(state: State, subqueue: Subqueue, outbox: Outbox) -> None:
    """Note that the subqueue fits nowhere, and after the grace reject what does not want to wait."""
    policy, since = state.policy, state.infeasible_since_s
    grace_s = policy.infeasible_grace_s
    if not state.nodes:
        grace_s = max(grace_s, policy.no_nodes_grace_s)
    if subqueue.requirements not in since:
        while len(since) >= MAX_REMEMBERED_REQUIREMENTS:
            del since[next(iter(since))]
        since[subqueue.requirements] = state.at_s
        state.set_timer(state.at_s + grace_s, Timer.CYCLE)
    if not subqueue.impatient or state.at_s < since[subqueue.requirements] + grace_s:
        return
    if awaited(state, subqueue.requirements) is not None:
        return
    for pending in list(subqueue.pending()):
        if not pending.request.wait_if_infeasible:
            text = infeasible_text(state, pending)
            reject(state, pending, RejectReason.INFEASIBLE, text, outbox)
