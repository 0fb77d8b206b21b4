"""The scheduler's state machine: ``step(state, event) -> commands``.

Every event is handled by one function of the table below; then the cycle places what can be placed
and makes room for what cannot, requests that have their leases are answered, and the next timer is
set. Events may come late, twice or in another order: what names something that is over is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.commands import (
    Command,
    Lost,
    Refusal,
    Reject,
    Reply,
    WakeAt,
)
from stoker_scheduler.core.leases.lifecycle import (
    adopt_by,
    block,
    claim,
    detach,
    disclaim,
    forget,
    lose,
    must_kill,
    reject,
    release,
    reply,
)
from stoker_scheduler.core.leases.membership import (
    lease_adopted,
    node_changed,
    node_joined,
    node_lost,
)
from stoker_scheduler.core.model.nodes import ANY_ENV, Refused
from stoker_scheduler.core.queueing.cycle import run_cycle
from stoker_scheduler.core.queueing.queue import Ask, account_of, keep_after_job
from stoker_scheduler.core.state import Phase, State
from stoker_scheduler.core.timers import run_timers

Out = list[Command]

REMEMBER_JOBS = 10_000
"""Finished jobs whose late requests are refused."""
MAX_REFUSED_ENVS = 64
"""Runtime environments per node whose failed starts are remembered."""


def step(state: State, event: ev.Event) -> list[Command]:
    """Take in one event, and return what is to be done, in order."""
    out: Out = []
    state.at_s = max(state.at_s, event.at_s)
    _HANDLERS[type(event)](state, event, out)
    run_cycle(state, out)
    _settle(state, out)
    timers = state.timers
    if timers and timers[0][0] < state.wake_at_s:
        state.wake_at_s = timers[0][0]
        out.append(WakeAt(at_s=state.wake_at_s))
    return out


def _settle(state: State, out: Out) -> None:
    """Answer the requests whose leases are all there, as far as there were places."""
    for request_id in list(state.unsettled):
        ask = state.asks.get(request_id)
        if ask is None or not ask.ready:
            continue
        if not ask.starting:
            reply(state, ask, out)
        else:
            state.set_timer(state.at_s + state.policy.linger_s, "linger", request_id)
    state.unsettled.clear()


# Requests


def _lease_asked(state: State, event: ev.LeaseAsked, out: Out) -> None:
    known = state.asks.get(event.request_id)
    if known is not None:
        known.deadline_s = max(known.deadline_s, event.deadline_s)
        return
    answer = state.answers.get(event.request_id)
    if answer is not None:
        still = [lease_id for lease_id in answer.lease_ids if _is_held(state, lease_id)]
        if still:
            # A leader before this one may have replaced leases that its nodes kept; those expire.
            told = tuple(still[: event.count])
            out.append(Reply(request_id=event.request_id, lease_ids=told))
            return
    if event.job_id in state.finished_jobs and not keep_after_job(event.kind, event.owner_id):
        text = f"job {event.job_id} is finished"
        out.append(Reject(request_id=event.request_id, refusal=Refusal.JOB_FINISHED, text=text))
        return
    account = account_of(event.owner_id, event.job_id)
    ask = Ask(
        asked=event,
        account=account,
        seq=state.next_number(),
        since_s=state.queue.since(account, event.class_key, state.at_s),
        deadline_s=event.deadline_s,
        wanted=event.count,
    )
    state.asks[event.request_id] = ask
    claim(state, ask)
    if ask.wanted:
        state.queue.put(ask)
        if not state.share(account):
            state.room_seen.pop(ask.need, None)  # who has nothing is not made to wait for a look
    state.set_timer(event.deadline_s, "deadline", event.request_id)


def _is_held(state: State, lease_id: str) -> bool:
    lease = state.leases.get(lease_id)
    return lease is not None and lease.phase is Phase.HELD


def _ask_cancelled(state: State, event: ev.LeaseAskCancelled, out: Out) -> None:
    ask = state.asks.get(event.request_id)
    if ask is not None:
        disclaim(state, ask)


# Leases


def _lease_started(state: State, event: ev.LeaseStarted, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is None or lease.phase is not Phase.STARTING:
        return
    lease.move(Phase.READY)
    state.starts.drop(lease)
    node = state.nodes[lease.node_id]
    for env in (ANY_ENV, lease.need.env):
        if node.refusals.pop(env, None) is not None:
            state.touch(node.node_id)
    ask = state.asks.get(lease.request_id)
    if ask is not None:
        del ask.starting[lease.lease_id]
        ask.ready[lease.lease_id] = None
        state.unsettled[ask.request_id] = None
        return
    state.set_timer(state.at_s + state.policy.lease_ttl_s, "unclaimed", lease.lease_id)
    lane = state.queue.lanes.get(lease.need)
    waiting = lane.accounts.get(lease.account, {}) if lane is not None else {}
    for other in waiting.values():
        if other.asked.class_key == lease.class_key:
            adopt_by(state, lease, other)
            other.wanted -= 1
            if other.wanted == 0:
                state.queue.drop(other)
            return


def _start_failed(state: State, event: ev.LeaseStartFailed, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is None or lease.phase is not Phase.STARTING:
        return
    fatal = event.failure is ev.StartFailure.ANYWHERE
    ask = detach(state, lease, again=not fatal)
    # Even a refusal is confirmed: another copy of the order may be late, and succeed.
    release(state, lease, out, kill=True, reason="it did not start", tell=False)
    if fatal:
        if ask is not None:
            reject(state, ask, Refusal.START_FAILED, event.text, out)
        return
    node, policy = state.nodes[lease.node_id], state.policy
    env = ANY_ENV if event.failure is ev.StartFailure.NODE else lease.need.env
    known = node.refusals.pop(env, None)
    count = known.count if known else 0
    pause_s = min(policy.shun_s * 2.0**count, policy.shun_max_s)
    until_s = state.at_s + pause_s
    node.refusals[env] = Refused(min(count + 1, 16), until_s, event.text or "no reason given")
    while len(node.refusals) > MAX_REFUSED_ENVS:
        del node.refusals[next(iter(node.refusals))]
    state.set_timer(until_s, "unshun", node.node_id)
    state.touch(node.node_id)


def _lease_released(state: State, event: ev.LeaseReleased, out: Out) -> None:
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is not None:
            kill = event.kill or must_kill(lease)
            release(state, lease, out, kill=kill, reason=event.reason, tell=False)


def _lease_ended(state: State, event: ev.LeaseEnded, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None and lease.phase is Phase.RELEASING:
        forget(state, lease)


def _lease_blocked(state: State, event: ev.LeaseBlocked, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None:
        block(state, lease, True)


def _lease_unblocked(state: State, event: ev.LeaseUnblocked, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None:
        block(state, lease, False)


def _worker_exited(state: State, event: ev.WorkerExited, out: Out) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None:
        lose(state, lease, out)


# Owners and jobs


def _owner_polled(state: State, event: ev.OwnerPolled, out: Out) -> None:
    lost = []
    idle = dict.fromkeys(event.idle_lease_ids)
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is None or lease.owner_id != event.owner_id or lease.phase is Phase.RELEASING:
            lost.append(lease_id)
            continue
        if lease.phase is not Phase.HELD:
            continue
        if lease.expires_at_s is not None:
            lease.expires_at_s = state.at_s + state.policy.lease_ttl_s
        lease.idle = lease_id in idle
        if lease.idle and not lease.recalled:
            state.idle[lease_id] = None
        else:
            state.idle.pop(lease_id, None)
    if lost:
        out.append(Lost(owner_id=event.owner_id, lease_ids=tuple(lost)))


def _owner_lost(state: State, event: ev.OwnerLost, out: Out) -> None:
    for ask in [ask for ask in state.asks.values() if ask.asked.owner_id == event.owner_id]:
        reject(state, ask, Refusal.OWNER_LOST, f"owner {event.owner_id} is gone", out)
    for lease in list(state.leases.values()):
        if lease.owner_id == event.owner_id:
            release(state, lease, out, kill=True, reason="its owner is gone", tell=False)


def _job_finished(state: State, event: ev.JobFinished, out: Out) -> None:
    job_id, finished = event.job_id, state.finished_jobs
    finished[job_id] = state.at_s
    if len(finished) > REMEMBER_JOBS:
        del finished[next(iter(finished))]
    for ask in [ask for ask in state.asks.values() if ask.asked.job_id == job_id]:
        if not keep_after_job(ask.asked.kind, ask.asked.owner_id):
            reject(state, ask, Refusal.JOB_FINISHED, f"job {job_id} is finished", out)
    for lease in [lease for lease in state.leases.values() if lease.job_id == job_id]:
        if not keep_after_job(lease.kind, lease.owner_id):
            release(state, lease, out, kill=True, reason="its job is finished", tell=True)


def _tick(state: State, event: ev.Tick, out: Out) -> None:
    state.wake_at_s = float("inf")
    run_timers(state, out)


_HANDLERS: dict[type, Callable[[State, Any, Out], None]] = {
    ev.NodeJoined: node_joined,
    ev.NodeChanged: node_changed,
    ev.NodeLost: node_lost,
    ev.LeaseAdopted: lease_adopted,
    ev.LeaseAsked: _lease_asked,
    ev.LeaseAskCancelled: _ask_cancelled,
    ev.LeaseStarted: _lease_started,
    ev.LeaseStartFailed: _start_failed,
    ev.LeaseReleased: _lease_released,
    ev.LeaseEnded: _lease_ended,
    ev.LeaseBlocked: _lease_blocked,
    ev.LeaseUnblocked: _lease_unblocked,
    ev.OwnerPolled: _owner_polled,
    ev.OwnerLost: _owner_lost,
    ev.JobFinished: _job_finished,
    ev.WorkerExited: _worker_exited,
    ev.Tick: _tick,
}
