"""One scheduling cycle: assign what fits, reject what never will, preempt and reserve for the rest.

Run by ``machine`` after every event. A subqueue whose requirements fit nowhere costs one look, however
many requests wait in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, RejectReason
from stoker_scheduler.core.leases.lifecycle import assign, reject
from stoker_scheduler.core.placement.explain import infeasible_text
from stoker_scheduler.core.placement.feasibility import could_ever_fit
from stoker_scheduler.core.queueing.preemption import preempt_busy, preempt_idle
from stoker_scheduler.core.queueing.queue import PendingRequest, Subqueue
from stoker_scheduler.core.queueing.reserve import update_reservations
from stoker_scheduler.core.state import State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements

Candidate = tuple[int, float, float, int, PendingRequest, Iterator[PendingRequest]]
"""Negated priority, share of the account, since, sequence: the order; then the request, and the
followers of its account in its subqueue."""

MAX_REMEMBERED_REQUIREMENTS = 4096


def run_cycle(state: State, outbox: Outbox) -> None:
    """Bring the queue as far as the cluster allows."""
    if not state.queue.subqueues and not state.reserved:
        return
    # 1. The requests that fit somewhere, best first; subqueues that fit nowhere are set aside.
    blocked: dict[Requirements, Subqueue] = {}
    heap = _candidates(state, blocked)
    # 2. Assign one lease at a time, so that accounts take turns.
    fair = len({candidate[4].account for candidate in heap}) > 1
    while heap:
        _, _, _, _, pending, followers = heapq.heappop(heap)
        requirements = pending.requirements
        if requirements in blocked:
            continue
        node_id = state.best_node(requirements, pending)
        if node_id is None:
            blocked[requirements] = state.queue.subqueues[requirements]
            continue
        assign(state, pending, state.nodes[node_id], outbox)
        following = pending if pending.wanted else next(followers, None)
        if following is not None:
            heapq.heappush(heap, _candidate(state, following, followers, fair))
    # 3. Those set aside: never possible, or only not now?
    waiting = []
    for subqueue in blocked.values():
        if can_ever_fit(state, subqueue.requirements):
            _clear_infeasible(state, subqueue)
            waiting.append(subqueue)
        else:
            _mark_infeasible(state, subqueue, outbox)
    # 4. Make room.
    _preempt_and_reserve(state, waiting, outbox)


def _preempt_and_reserve(state: State, waiting: list[Subqueue], outbox: Outbox) -> None:
    """Preempt idle leases at once; look at busy ones now and then, and for each new subqueue."""
    if state.at_s >= state.preemption_due_s and (waiting or state.reserved):
        state.preemption_due_s = state.at_s + state.policy.preemption_pause_s
        state.set_timer(state.preemption_due_s, Timer.CYCLE)
        state.preemption_checked.clear()
        update_reservations(state, waiting)
    for subqueue in waiting:
        if state.idle:
            preempt_idle(state, subqueue, outbox)
        if subqueue.requirements not in state.preemption_checked:
            state.preemption_checked[subqueue.requirements] = None
            preempt_busy(state, subqueue, outbox)


def _candidates(state: State, blocked: dict[Requirements, Subqueue]) -> list[Candidate]:
    heap: list[Candidate] = []
    subqueues = state.queue.subqueues
    aging_s, at_s = state.policy.aging_s, state.at_s
    fair = len(subqueues) > 1 or any(len(one.accounts) > 1 for one in subqueues.values())
    for requirements, subqueue in subqueues.items():
        if state.best_node(requirements) is None:
            blocked[requirements] = subqueue
            continue
        for waiting in subqueue.accounts.values():
            ordered = list(waiting.values())
            if len(ordered) > 1:
                ordered.sort(key=lambda p: (-p.effective_priority(at_s, aging_s), p.since_s, p.seq))
            followers = iter(ordered)
            heap.append(_candidate(state, next(followers), followers, fair))
    heapq.heapify(heap)
    return heap


def _candidate(
    state: State, pending: PendingRequest, followers: Iterator[PendingRequest], fair: bool
) -> Candidate:
    priority = pending.effective_priority(state.at_s, state.policy.aging_s)
    share = state.share(pending.account) if fair else 0.0
    return -priority, share, pending.since_s, pending.seq, pending, followers


def can_ever_fit(state: State, requirements: Requirements) -> bool:
    """Return whether any node there is could take ``requirements`` if it were idle."""
    answer = state.feasible.get(requirements)
    if answer is None:
        if len(state.feasible) >= MAX_REMEMBERED_REQUIREMENTS:
            state.feasible.clear()
        answer = any(could_ever_fit(node, requirements) for node in state.nodes.values())
        state.feasible[requirements] = answer
    return answer


def _clear_infeasible(state: State, subqueue: Subqueue) -> None:
    if state.infeasible_since_s.pop(subqueue.requirements, None) is not None:
        for pending in subqueue.pending():
            pending.infeasible = False


def _mark_infeasible(state: State, subqueue: Subqueue, outbox: Outbox) -> None:
    """Mark the subqueue's requests, and after the grace reject those that do not want to wait."""
    policy, since = state.policy, state.infeasible_since_s
    grace_s = policy.infeasible_grace_s
    if not state.nodes:
        grace_s = max(grace_s, policy.no_nodes_grace_s)
    if subqueue.requirements not in since:
        while len(since) >= MAX_REMEMBERED_REQUIREMENTS:
            del since[next(iter(since))]
        since[subqueue.requirements] = state.at_s
        state.set_timer(state.at_s + grace_s, Timer.CYCLE)
    due = state.at_s >= since[subqueue.requirements] + grace_s
    for pending in list(subqueue.pending()):
        pending.infeasible = True
        if due and not pending.request.wait_if_infeasible:
            text = infeasible_text(state, pending)
            reject(state, pending, RejectReason.INFEASIBLE, text, outbox)
