"""One scheduling cycle: place what fits, refuse what never will, make room for the rest.

A lane whose need fits nowhere costs one look, however many requests wait in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Command, Refusal
from stoker_scheduler.core.leases.lifecycle import place, reject
from stoker_scheduler.core.placement.explain import infeasible_text
from stoker_scheduler.core.placement.feasibility import could_ever_fit
from stoker_scheduler.core.queueing.preemption import recall_busy, recall_idle
from stoker_scheduler.core.queueing.queue import Ask, Lane
from stoker_scheduler.core.queueing.reserve import keep_reservations

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Need
    from stoker_scheduler.core.state import State

Candidate = tuple[int, float, float, int, Ask, Iterator[Ask]]
"""Negated priority, share of the account, since, sequence: the order; then the ask and its heirs."""

MAX_REMEMBERED_NEEDS = 4096


def run_cycle(state: State, out: list[Command]) -> None:
    """Bring the queue as far as the cluster allows."""
    if not state.queue.lanes and not state.reserved:
        return
    # 1. Who could be placed, best first; lanes that fit nowhere are set aside.
    blocked: dict[Need, Lane] = {}
    heap = _candidates(state, blocked)
    # 2. Place one lease at a time, so that accounts take turns.
    fair = len({candidate[4].account for candidate in heap}) > 1
    while heap:
        _, _, _, _, ask, heirs = heapq.heappop(heap)
        if ask.need in blocked:
            continue
        node_id = state.best_node(ask.need, ask)
        if node_id is None:
            blocked[ask.need] = state.queue.lanes[ask.need]
            continue
        place(state, ask, state.nodes[node_id], out)
        following = ask if ask.wanted else next(heirs, None)
        if following is not None:
            heapq.heappush(heap, _candidate(state, following, heirs, fair))
    # 3. Those set aside: never possible, or only not now?
    waiting = []
    for lane in blocked.values():
        if could_ever(state, lane.need):
            _forget_infeasible(state, lane)
            waiting.append(lane)
        else:
            _judge_infeasible(state, lane, out)
    # 4. Make room.
    _make_room(state, waiting, out)


def _make_room(state: State, waiting: list[Lane], out: list[Command]) -> None:
    """Recall what is idle at once; look at what is busy now and then, and for each new lane."""
    if state.at_s >= state.room_due_s and (waiting or state.reserved):
        state.room_due_s = state.at_s + state.policy.recall_pause_s
        state.set_timer(state.room_due_s, "cycle")
        state.room_seen.clear()
        keep_reservations(state, waiting)
    for lane in waiting:
        if state.idle:
            recall_idle(state, lane, out)
        if lane.need not in state.room_seen:
            state.room_seen[lane.need] = None
            recall_busy(state, lane, out)


def _candidates(state: State, blocked: dict[Need, Lane]) -> list[Candidate]:
    heap: list[Candidate] = []
    lanes = state.queue.lanes
    aging_s, at_s = state.policy.aging_s, state.at_s
    several = len(lanes) > 1 or any(len(lane.accounts) > 1 for lane in lanes.values())
    for lane in lanes.values():
        if state.best_node(lane.need) is None:
            blocked[lane.need] = lane
            continue
        for waiting in lane.accounts.values():
            asks = list(waiting.values())
            if len(asks) > 1:
                asks.sort(key=lambda a: (-a.effective_priority(at_s, aging_s), a.since_s, a.seq))
            heirs = iter(asks)
            heap.append(_candidate(state, next(heirs), heirs, several))
    heapq.heapify(heap)
    return heap


def _candidate(state: State, ask: Ask, heirs: Iterator[Ask], fair: bool) -> Candidate:
    priority = ask.effective_priority(state.at_s, state.policy.aging_s)
    share = state.share(ask.account) if fair else 0.0
    return -priority, share, ask.since_s, ask.seq, ask, heirs


def could_ever(state: State, need: Need) -> bool:
    """Whether any node there is could take ``need`` if it were idle."""
    answer = state.feasible.get(need)
    if answer is None:
        if len(state.feasible) >= MAX_REMEMBERED_NEEDS:
            state.feasible.clear()
        answer = any(could_ever_fit(node, need) for node in state.nodes.values())
        state.feasible[need] = answer
    return answer


def _forget_infeasible(state: State, lane: Lane) -> None:
    if state.infeasible_since_s.pop(lane.need, None) is not None:
        for ask in lane.asks():
            ask.infeasible = False


def _judge_infeasible(state: State, lane: Lane, out: list[Command]) -> None:
    policy, since = state.policy, state.infeasible_since_s
    grace_s = policy.infeasible_grace_s
    if not state.nodes:
        grace_s = max(grace_s, policy.no_nodes_grace_s)
    if lane.need not in since:
        while len(since) >= MAX_REMEMBERED_NEEDS:
            del since[next(iter(since))]
        since[lane.need] = state.at_s
        state.set_timer(state.at_s + grace_s, "cycle")
    due = state.at_s >= since[lane.need] + grace_s
    for ask in list(lane.asks()):
        ask.infeasible = True
        if due and not ask.asked.wait_if_infeasible:
            text = infeasible_text(state, ask)
            reject(state, ask, Refusal.INFEASIBLE, text, out)
