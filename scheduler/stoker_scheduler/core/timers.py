"""What happens when a timer is due: waits that pass, leases that expire, nodes tried again."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from stoker_scheduler.core.commands import Command
from stoker_scheduler.core.leases.lifecycle import must_kill, release, reply
from stoker_scheduler.core.placement.explain import waiting_note
from stoker_scheduler.core.state import Phase, State

Out = list[Command]


def run_timers(state: State, out: Out) -> None:
    """Handle all timers that are due."""
    timers = state.timers
    while timers and timers[0][0] <= state.at_s:
        _, _, what, subject = heapq.heappop(timers)
        handler = _TIMERS.get(what)
        if handler is not None:
            handler(state, subject, out)


def _deadline_passed(state: State, request_id: str, out: Out) -> None:
    ask = state.asks.get(request_id)
    if ask is None:
        return
    if ask.deadline_s > state.at_s:
        state.set_timer(ask.deadline_s, "deadline", request_id)
        return
    if ask.starting and not ask.ready:
        # A worker is on its way: hand it over rather than let the owner ask again for it.
        late_s = ask.deadline_s + state.policy.start_grace_s
        if state.at_s < late_s:
            state.set_timer(late_s, "deadline", request_id)
            return
    reply(state, ask, out, "" if ask.ready else waiting_note(state, ask))


def _linger_passed(state: State, request_id: str, out: Out) -> None:
    ask = state.asks.get(request_id)
    if ask is not None and ask.ready:
        reply(state, ask, out)


def _expiry_due(state: State, lease_id: str, out: Out) -> None:
    lease = state.leases.get(lease_id)
    if lease is None or lease.phase is not Phase.HELD or lease.expires_at_s is None:
        return
    if lease.expires_at_s > state.at_s:
        state.set_timer(lease.expires_at_s, "expire", lease_id)
        return
    ttl_s = state.policy.lease_ttl_s
    reason = f"its owner {lease.owner_id} did not renew it for {ttl_s:g} s"
    release(state, lease, out, kill=True, reason=reason, tell=True)


def _unclaimed_due(state: State, lease_id: str, out: Out) -> None:
    lease = state.leases.get(lease_id)
    if lease is not None and lease_id in state.unclaimed:
        kill = must_kill(lease)
        release(state, lease, out, kill=kill, reason="nobody asked for it again", tell=False)


def _unshun_due(state: State, node_id: str, out: Out) -> None:
    node = state.nodes.get(node_id)
    if node is None:
        return
    for env, refused in node.refusals.items():
        if refused.because and refused.until_s <= state.at_s:
            node.refusals[env] = replace(refused, because="")
            state.touch(node_id)


_TIMERS: dict[str, Callable[[State, str, Out], None]] = {
    "deadline": _deadline_passed,
    "linger": _linger_passed,
    "expire": _expiry_due,
    "unclaimed": _unclaimed_due,
    "unshun": _unshun_due,
}
"""What a timer does; the others ("cycle") only make the cycle run."""
