"""The handlers of timers that are due: waits that pass, leases that expire, backoffs that end."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from stoker_scheduler.core.commands import PreemptGroup
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.evictions import evict
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.leases.lifecycle import end_wait, grant, must_kill, release
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.explain import waiting_note
from stoker_scheduler.core.queueing.extenders import expire_answers
from stoker_scheduler.core.state import State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.commands import Outbox


def run_timers(state: State, outbox: Outbox) -> None:
    """Handle all timers that are due."""
    timers = state.timers
    while timers and timers[0][0] <= state.at_s:
        _, _, timer, subject = heapq.heappop(timers)
        match timer:
            case Timer.DEADLINE:
                _deadline_passed(state, subject, outbox)
            case Timer.LINGER:
                _linger_passed(state, subject, outbox)
            case Timer.EXPIRY:
                _expiry_due(state, subject, outbox)
            case Timer.EVICT:
                if subject in state.nodes:
                    evict(state, state.nodes[subject], outbox)
            case Timer.ORPHAN:
                _orphan_due(state, subject, outbox)
            case Timer.BACKOFF:
                _backoff_passed(state, subject)
            case Timer.SLOW_RANK:
                _slow_rank_forgotten(state, subject)
            case Timer.EXTENDERS:
                expire_answers(state, outbox)
            case Timer.STOP:
                _stop_due(state, subject, outbox)
            case Timer.RATE:
                state.rate_due_s.pop(subject, None)
                state.wake_held(subject)
            case Timer.CYCLE:
                state.review_due = True
            case Timer.REVIEW:
                state.review_due = True
                state.review_at_s = math.inf
            case _:
                assert_never(timer)


def _deadline_passed(state: State, request_id: str, outbox: Outbox) -> None:
    pending = state.pending.get(request_id)
    if pending is None:
        return
    if pending.deadline_s > state.at_s:
        state.set_timer(pending.deadline_s, Timer.DEADLINE, request_id)
        return
    if pending.ready and not isinstance(pending.requirements, Gang):
        grant(state, pending, outbox)
        return
    if pending.starting or pending.committing:
        # A worker is on its way: grant it rather than have the owner request it again.
        late_s = pending.deadline_s + state.policy.start_grace_s
        if state.at_s < late_s:
            state.set_timer(late_s, Timer.DEADLINE, request_id)
            return
    end_wait(state, pending, outbox, waiting_note(state, pending))


def _linger_passed(state: State, request_id: str, outbox: Outbox) -> None:
    pending = state.pending.get(request_id)
    if pending is not None and pending.ready:
        grant(state, pending, outbox)


def _expiry_due(state: State, lease_id: str, outbox: Outbox) -> None:
    lease = state.leases.get(lease_id)
    if lease is None or lease.phase is not Phase.HELD or lease.expires_at_s is None:
        return
    if lease.expires_at_s > state.at_s:
        state.set_timer(lease.expires_at_s, Timer.EXPIRY, lease_id)
        return
    reason = f"its owner {lease.owner_id} does not say that it has it"
    release(state, lease, outbox, kill=True, reason=reason, notify=True)


def _stop_due(state: State, lease_id: str, outbox: Outbox) -> None:
    """Kill what a nodelet was told to end, and did not: it may not have been told."""
    lease = state.leases.get(lease_id)
    if lease is None or not lease.stop_reason or lease.phase is not Phase.HELD:
        return
    if lease.kind is Kind.BUNDLE:
        # The gcs decides what exists: it asks for the bundles again, and those here are given up.
        outbox.append(
            PreemptGroup(group_id=lease.group_id, lease_id=lease_id, reason=lease.stop_reason)
        )
    else:
        release(state, lease, outbox, kill=True, reason=lease.stop_reason, notify=True)


def _orphan_due(state: State, lease_id: str, outbox: Outbox) -> None:
    lease = state.leases.get(lease_id)
    if lease is not None and lease_id in state.orphaned:
        reason = "orphaned: its request had ended and was not repeated"
        release(state, lease, outbox, kill=must_kill(lease), reason=reason, notify=False)


def _backoff_passed(state: State, node_id: str) -> None:
    node = state.nodes.get(node_id)
    if node is None:
        return
    for env, backoff in node.backoffs.items():
        if backoff.cause and backoff.until_s <= state.at_s:
            node.backoffs[env] = replace(backoff, cause="")
            state.mark_dirty(node_id)


def _slow_rank_forgotten(state: State, node_id: str) -> None:
    node = state.nodes.get(node_id)
    if node is None:
        return
    for rank, until_s in list(node.slow_ranks.items()):
        if until_s <= state.at_s:
            del node.slow_ranks[rank]
    state.mark_dirty(node_id)
