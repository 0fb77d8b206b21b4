"""The scheduler's state machine: ``step(state, event) -> commands``.

Each event has one handler; then the cycle assigns what fits and makes room for what does not,
requests whose leases are ready are granted, and the next timer is set. Events may come late, twice or
in another order: one that names something that is gone is ignored.
"""

from __future__ import annotations

from typing import assert_never

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.commands import (
    CommitBundles,
    Lost,
    Outbox,
    Reject,
    RejectReason,
    Reply,
    WakeAt,
)
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import (
    attach,
    attach_orphans,
    detach,
    end_request,
    grant,
    lease_ended,
    lose_owner,
    mark_lost,
    must_kill,
    reject,
    release,
    release_incomplete,
    set_blocked,
    set_expiry,
)
from stoker_scheduler.core.leases.membership import (
    lease_adopted,
    node_changed,
    node_joined,
    node_lost,
    rank_slow,
)
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.groups import PlacementGroup
from stoker_scheduler.core.model.nodes import ANY_ENV, Backoff
from stoker_scheduler.core.queueing.cycle import assign_at_once, run_cycle
from stoker_scheduler.core.queueing.extenders import ask_extenders, extenders_answered
from stoker_scheduler.core.queueing.queue import PendingRequest, account_of, outlives_job
from stoker_scheduler.core.state import State, Timer
from stoker_scheduler.core.timers import run_timers

REMEMBER_JOBS = 10_000
"""Finished jobs whose late requests are rejected."""
REMEMBER_GROUPS = 10_000
"""Removed placement groups whose late requests are rejected."""
MAX_BACKOFF_ENVS = 64
"""Runtime environments per node whose failed starts are remembered."""


def step(state: State, event: ev.Event) -> Outbox:
    """Apply one event, and return the commands that follow from it, in order."""
    outbox: Outbox = []
    state.at_s = max(state.at_s, event.at_s)
    _handle(state, event, outbox)
    if state.incomplete:
        release_incomplete(state, outbox)
    run_cycle(state, outbox)
    if state.unsettled and _settle(state, outbox):
        run_cycle(state, outbox)
    if state.incomplete:
        release_incomplete(state, outbox)
    waits = state.queue.blocked.members or state.reserved
    if waits and not isinstance(event, (ev.Tick, ev.OwnerPolled)):
        state.set_review(state.at_s + state.policy.preemption_pause_s)
    timers = state.timers
    if timers and timers[0][0] < state.wake_at_s:
        state.wake_at_s = timers[0][0]
        outbox.append(WakeAt(at_s=state.wake_at_s))
    return outbox


def _handle(state: State, event: ev.Event, outbox: Outbox) -> None:
    """Call the event's handler; the frequent events come first."""
    match event:
        case ev.LeaseRequested():
            _lease_requested(state, event, outbox)
        case ev.LeaseStarted():
            _lease_started(state, event)
        case ev.LeaseReleased():
            _lease_released(state, event, outbox)
        case ev.LeaseEnded():
            _lease_ended(state, event)
        case ev.OwnerPolled():
            _owner_polled(state, event, outbox)
        case ev.LeaseBlocked():
            _lease_blocked(state, event.lease_id, True)
        case ev.LeaseUnblocked():
            _lease_blocked(state, event.lease_id, False)
        case ev.Tick():
            _tick(state, outbox)
        case ev.LeaseRequestCancelled():
            _request_cancelled(state, event)
        case ev.LeaseStartFailed():
            _start_failed(state, event, outbox)
        case ev.WorkerExited():
            _worker_exited(state, event, outbox)
        case ev.OwnerLost():
            _owner_lost(state, event, outbox)
        case ev.JobAdded():
            state.finished_jobs.pop(event.job_id, None)
        case ev.JobFinished():
            _job_finished(state, event, outbox)
        case ev.BundlesHeld():
            _bundles_held(state, event)
        case ev.BundlesCommitted():
            _bundles_committed(state, event)
        case ev.BundlesLost():
            _bundles_lost(state, event, outbox)
        case ev.QueuesChanged():
            _queues_changed(state, event)
        case ev.GroupAdded():
            _group_added(state, event)
        case ev.GroupShrunk():
            _group_shrunk(state, event, outbox)
        case ev.GroupRemoved():
            _group_removed(state, event, outbox)
        case ev.RankSlow():
            rank_slow(state, event)
        case ev.ExtendersAnswered():
            extenders_answered(state, event)
        case ev.LeaseAdopted():
            lease_adopted(state, event, outbox)
        case ev.NodeJoined():
            node_joined(state, event, outbox)
        case ev.NodeChanged():
            node_changed(state, event, outbox)
        case ev.NodeLost():
            node_lost(state, event, outbox)
        case _:
            assert_never(event)


def _settle(state: State, outbox: Outbox) -> bool:
    """Grant the requests that have nothing starting; let the others linger for what is.

    Return whether a gang was granted: what waits for its bundles may go into them now.
    """
    opened = False
    for request_id in list(state.unsettled):
        pending = state.pending.get(request_id)
        if pending is None or not pending.ready:
            continue
        if isinstance(pending.requirements, Gang):
            opened |= _settle_gang(state, pending, outbox)
        elif not pending.starting:
            grant(state, pending, outbox)
        else:
            state.set_timer(state.at_s + state.policy.linger_s, Timer.LINGER, request_id)
    state.unsettled.clear()
    return opened


def _settle_gang(state: State, pending: PendingRequest, outbox: Outbox) -> bool:
    """Grant a gang that is ready, and committed if its bundles are on more nodes than one.

    Not before its group is known: a request can be ahead of it, or come late, after the group's end.
    """
    if pending.starting or pending.committing or pending.request.group_id not in state.groups:
        return False
    ready = [state.leases[lease_id] for lease_id in pending.ready]
    if len({lease.node_id for lease in ready}) == 1 or pending.is_committed:
        grant(state, pending, outbox)
        return True
    pending.is_committed = True
    pending.committing = dict.fromkeys(pending.ready)
    on_node: dict[str, list[str]] = {}
    for lease in ready:
        on_node.setdefault(lease.node_id, []).append(lease.lease_id)
    for node_id, lease_ids in on_node.items():
        outbox.append(CommitBundles(lease_ids=tuple(lease_ids), node_id=node_id))
    return False


# Requests


def _lease_requested(state: State, event: ev.LeaseRequested, outbox: Outbox) -> None:
    known = state.pending.get(event.request_id)
    if known is not None:
        known.deadline_s = max(known.deadline_s, event.deadline_s)
        return
    answer = state.answers.get(event.request_id)
    if answer is not None:
        held = [lease_id for lease_id in answer.lease_ids if _is_held(state, lease_id)]
        # The leader before may not have told all nodes: a part of a gang is of no use.
        if len(held) >= len(event.indices) and held:
            # A leader before this one may have replaced leases that its nodes kept; those expire.
            again = tuple(held[: max(event.count, len(event.indices))])
            for lease_id in again:
                state.leases[lease_id].unlisted_at_s = None
            outbox.append(Reply(request_id=event.request_id, lease_ids=again))
            return
    if event.job_id in state.finished_jobs and not outlives_job(event.kind, event.owner_id):
        text = f"job {event.job_id} is finished"
        outbox.append(
            Reject(request_id=event.request_id, reason=RejectReason.JOB_FINISHED, text=text)
        )
        return
    belongs_to = event.belongs_to
    group_id = belongs_to[2]
    if group_id in state.removed_groups:
        text = f"placement group {group_id} was removed"
        outbox.append(
            Reject(request_id=event.request_id, reason=RejectReason.GROUP_REMOVED, text=text)
        )
        return
    account = account_of(event)
    state.tenants.add(account, state.usage)
    pending = PendingRequest(
        request=event,
        account=account,
        belongs_to=belongs_to,
        seq=state.next_number(),
        since_s=state.queue.since(account, event.class_key, state.at_s),
        deadline_s=event.deadline_s,
    )
    if isinstance(event.requirements, Gang):
        _give_up_bundles(state, event)
    state.pending[event.request_id] = pending
    state.request_index.add(event.request_id, belongs_to)
    if event.requirements.extenders:
        ask_extenders(state, event.requirements, outbox)
    wanted = event.count - attach_orphans(state, pending, event.count)
    state.queue.want(pending, wanted - assign_at_once(state, pending, wanted, outbox))
    if pending.wanted and not state.share(account):
        # An account that has nothing does not wait for the next look at busy leases.
        state.preemption_checked.pop(pending.requirements, None)
    state.set_timer(event.deadline_s, Timer.DEADLINE, event.request_id)


def _give_up_bundles(state: State, event: ev.LeaseRequested) -> None:
    """Have the bundles released that the gcs asks for again: a part of a gang, or from before a loss."""
    group = state.groups.get(event.group_id)
    for index in event.indices if group is not None else ():
        place = group.bundles.get(index) if group is not None else None
        if place is not None:
            state.incomplete[place.bundle_lease_id] = None


def _is_held(state: State, lease_id: str) -> bool:
    lease = state.leases.get(lease_id)
    return lease is not None and lease.phase is Phase.HELD


def _request_cancelled(state: State, event: ev.LeaseRequestCancelled) -> None:
    pending = state.pending.get(event.request_id)
    if pending is not None:
        end_request(state, pending)


# Leases


def _lease_started(state: State, event: ev.LeaseStarted) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None and lease.phase is Phase.STARTING:
        _ready(state, lease)


def _ready(state: State, lease: LeaseState) -> None:
    lease.move(Phase.READY)
    state.starting.discard(lease)
    node = state.nodes[lease.node_id]
    for env in (ANY_ENV, lease.requirements.env):
        if node.backoffs.pop(env, None) is not None:
            state.mark_dirty(node.node_id)
    pending = state.pending.get(lease.request_id)
    if pending is not None:
        del pending.starting[lease.lease_id]
        pending.ready[lease.lease_id] = None
        state.unsettled[pending.request_id] = None
        return
    state.set_timer(state.at_s + state.policy.lease_ttl_s, Timer.ORPHAN, lease.lease_id)
    subqueue = state.queue.subqueues.get(lease.requirements)
    waiting = subqueue.accounts.get(lease.account) if subqueue is not None else None
    for other in waiting or ():
        if other.request.class_key == lease.class_key:
            attach(state, lease, other)
            state.queue.want(other, other.wanted - 1)
            return


def _start_failed(state: State, event: ev.LeaseStartFailed, outbox: Outbox) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is None or lease.phase is not Phase.STARTING:
        return
    fatal = event.failure is ev.StartFailure.ANYWHERE
    pending = detach(state, lease, requeue=not fatal)
    # The end is confirmed even so: another copy of the order may be late, and succeed.
    release(state, lease, outbox, kill=True, reason="it did not start", notify=False)
    if fatal:
        if pending is not None:
            reject(state, pending, RejectReason.START_FAILED, event.text, outbox)
        return
    _back_off(state, lease.node_id, lease.requirements.env, event)


def _back_off(state: State, node_id: str, env: str, event: ev.LeaseStartFailed) -> None:
    """Start nothing more on the node for a while, exponentially longer with each failure."""
    node, policy = state.nodes[node_id], state.policy
    if event.failure is ev.StartFailure.NODE:
        env = ANY_ENV
    known = node.backoffs.pop(env, None)
    count = known.count if known else 0
    until_s = state.at_s + min(policy.backoff_s * 2.0**count, policy.backoff_max_s)
    node.backoffs[env] = Backoff(min(count + 1, 16), until_s, event.text or "no reason given")
    while len(node.backoffs) > MAX_BACKOFF_ENVS:
        del node.backoffs[next(iter(node.backoffs))]
    state.set_timer(until_s, Timer.BACKOFF, node_id)
    state.mark_dirty(node_id)


def _lease_released(state: State, event: ev.LeaseReleased, outbox: Outbox) -> None:
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is not None:
            kill = event.kill or must_kill(lease)
            release(state, lease, outbox, kill=kill, reason=event.reason, notify=False)


def _lease_ended(state: State, event: ev.LeaseEnded) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None and lease.phase is Phase.RELEASING:
        lease_ended(state, lease)


def _lease_blocked(state: State, lease_id: str, blocked: bool) -> None:
    lease = state.leases.get(lease_id)
    if lease is not None:
        set_blocked(state, lease, blocked)


def _worker_exited(state: State, event: ev.WorkerExited, outbox: Outbox) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is not None:
        mark_lost(state, lease, outbox)


# Placement groups


def _bundles_held(state: State, event: ev.BundlesHeld) -> None:
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is not None and lease.phase is Phase.STARTING:
            _ready(state, lease)


def _bundles_committed(state: State, event: ev.BundlesCommitted) -> None:
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        pending = state.pending.get(lease.request_id) if lease is not None else None
        if pending is not None and lease_id in pending.committing:
            del pending.committing[lease_id]
            state.unsettled[pending.request_id] = None


def _bundles_lost(state: State, event: ev.BundlesLost, outbox: Outbox) -> None:
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is not None:
            reason = "its nodelet gave it up before it was committed"
            release(state, lease, outbox, kill=True, reason=reason, notify=True)


def _group_added(state: State, event: ev.GroupAdded) -> None:
    if event.group_id not in state.groups and event.group_id not in state.removed_groups:
        group = PlacementGroup(event.group_id, event.job_id, event.gang)
        state.groups[event.group_id] = group
        for request_id in state.request_index.of(event.group_id):
            state.unsettled[request_id] = None
        state.review_due = True


def _group_shrunk(state: State, event: ev.GroupShrunk, outbox: Outbox) -> None:
    group = state.groups.get(event.group_id)
    if group is None:
        return
    group.released.update(dict.fromkeys(event.bundles))
    text = f"placement group {event.group_id} has given the bundle up"
    for lease_id in state.lease_index.of(event.group_id):
        lease = state.leases[lease_id]
        if lease.kind is Kind.BUNDLE and lease.bundle in group.released:
            release(state, lease, outbox, kill=True, reason=text, notify=True)
    state.review_due = True


def _group_removed(state: State, event: ev.GroupRemoved, outbox: Outbox) -> None:
    group_id = event.group_id
    state.removed_groups[group_id] = None
    if len(state.removed_groups) > REMEMBER_GROUPS:
        del state.removed_groups[next(iter(state.removed_groups))]
    text = f"placement group {group_id} was removed"
    for request_id in state.request_index.of(group_id):
        reject(state, state.pending[request_id], RejectReason.GROUP_REMOVED, text, outbox)
    for lease_id in state.lease_index.of(group_id):
        release(state, state.leases[lease_id], outbox, kill=True, reason=text, notify=True)
    state.groups.pop(group_id, None)
    state.review_due = True


# Queues


def _queues_changed(state: State, event: ev.QueuesChanged) -> None:
    waiting = [pending.account for pending in state.pending.values()]
    state.tenants.change(event.queues, state.usage, waiting)
    state.review_due = True


# Owners and jobs


def _owner_polled(state: State, event: ev.OwnerPolled, outbox: Outbox) -> None:
    lost = []
    named = dict.fromkeys(event.lease_ids)
    idle = dict.fromkeys(event.idle_lease_ids)
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is None or lease.owner_id != event.owner_id or lease.phase is Phase.RELEASING:
            lost.append(lease_id)
            continue
        if lease.phase is not Phase.HELD:
            continue
        lease.expires_at_s = None
        lease.idle = lease_id in idle
        if lease.idle and not lease.preempted:
            state.idle_grew |= lease_id not in state.idle
            state.idle[lease_id] = None
        else:
            state.idle.pop(lease_id, None)
    for lease_id in state.lease_index.of(event.owner_id):
        lease = state.leases[lease_id]
        if lease_id in named or lease.phase is not Phase.HELD:
            continue
        if lease.expires_at_s is None:
            # Its release is on its way, or was lost. A lost grant is asked for again.
            set_expiry(state, lease, state.policy.lease_ttl_s)
        elif lease.unlisted_at_s is None:
            lease.unlisted_at_s = state.at_s
        elif state.at_s - lease.unlisted_at_s >= state.policy.lease_ttl_s:
            # An owner that speaks again after so long has no answer on its way: it released the lease at
            # a leader that was lost, or a copy of its request came after the release.
            reason = f"its owner {lease.owner_id} has released it, or never wanted it"
            release(state, lease, outbox, kill=True, reason=reason, notify=True)
    if lost:
        outbox.append(Lost(owner_id=event.owner_id, lease_ids=tuple(lost)))


def _owner_lost(state: State, event: ev.OwnerLost, outbox: Outbox) -> None:
    lose_owner(state, event.owner_id, f"its owner {event.owner_id} is gone", outbox)


def _job_finished(state: State, event: ev.JobFinished, outbox: Outbox) -> None:
    job_id, finished = event.job_id, state.finished_jobs
    finished[job_id] = state.at_s
    if len(finished) > REMEMBER_JOBS:
        del finished[next(iter(finished))]
    text = f"job {job_id} is finished"
    for request_id in state.request_index.of(job_id):
        pending = state.pending[request_id]
        if not outlives_job(pending.request.kind, pending.request.owner_id):
            reject(state, pending, RejectReason.JOB_FINISHED, text, outbox)
    for lease_id in state.lease_index.of(job_id):
        lease = state.leases[lease_id]
        if not outlives_job(lease.kind, lease.owner_id):
            release(state, lease, outbox, kill=True, reason="its job is finished", notify=True)


def _tick(state: State, outbox: Outbox) -> None:
    state.wake_at_s = float("inf")
    run_timers(state, outbox)
