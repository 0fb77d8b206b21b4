"""The moves of a lease and of a request: assigned, started, granted, released, lost.

Each function makes one move and leaves the state's accounts balanced (``State.check``); ``machine``
and ``timers`` decide when. A lease is granted in :func:`grant` and nowhere else.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import (
    Lost,
    Outbox,
    Reject,
    RejectReason,
    ReleaseLease,
    Reply,
    StartWorker,
)
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.model.resources import CPU
from stoker_scheduler.core.placement.scoring import NODE_ORDERS
from stoker_scheduler.core.queueing.queue import GCS_OWNER, PendingRequest
from stoker_scheduler.core.state import Answer, State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements


def assign(state: State, pending: PendingRequest, node: NodeInfo, outbox: Outbox) -> None:
    """Allocate one lease of ``pending`` on ``node``, where it fits, and have its worker started."""
    request, requirements = pending.request, pending.requirements
    gpus = node.devices.choose(requirements.gpu) or {}
    lease = LeaseState(
        lease_id=lease_id_of(request.request_id, state.term, state.next_number()),
        owner_id=request.owner_id,
        account=pending.account,
        job_id=request.job_id,
        kind=request.kind,
        node_id=node.node_id,
        incarnation=node.spec.incarnation,
        requirements=requirements,
        gpus=gpus,
        class_key=request.class_key,
        priority=request.priority,
        granted_at_s=state.at_s,
        request_id=request.request_id,
        actor_id=request.actor_id,
        name=request.name,
    )
    if NODE_ORDERS[requirements.policy].takes_turns:
        node.turn = state.next_number()
    add_lease(state, lease, node)
    pending.starting[lease.lease_id] = None
    pending.wanted -= 1
    if pending.wanted == 0:
        state.queue.discard(pending)
    state.placed += 1
    reservation = state.reserved.get(requirements)
    if reservation is not None and reservation.node_id == node.node_id:
        cancel_reservation(state, requirements)
    outbox.append(
        StartWorker(
            lease_id=lease.lease_id,
            request_id=request.request_id,
            node_id=node.node_id,
            gpus=gpus,
        )
    )


def cancel_reservation(state: State, requirements: Requirements) -> None:
    """Open the node that is reserved for ``requirements`` to all again."""
    reservation = state.reserved.pop(requirements)
    node = state.nodes[reservation.node_id]
    node.reserved_for, node.reserved_names = None, frozenset()
    state.mark_dirty(reservation.node_id)


def add_lease(state: State, lease: LeaseState, node: NodeInfo) -> None:
    """Add a new lease to the state, and allocate its resources on its node."""
    node.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)
    node.leases[lease.lease_id] = None
    state.leases[lease.lease_id] = lease
    if lease.phase is Phase.STARTING:
        state.starting.add(lease)
    state.charge(lease.account, lease.allocated, +1)
    state.mark_dirty(node.node_id)


def remove_lease(state: State, lease: LeaseState) -> None:
    """Remove a lease from the state, and free its resources."""
    detach(state, lease)
    del state.leases[lease.lease_id]
    state.charge(lease.account, lease.allocated, -1)
    node = state.nodes[lease.node_id]
    del node.leases[lease.lease_id]
    node.free(lease.requirements, lease.gpus, blocked=lease.blocked)
    state.mark_dirty(lease.node_id)


def attach(state: State, lease: LeaseState, pending: PendingRequest) -> None:
    """Attach an orphaned lease to a request (the caller counts ``wanted``)."""
    del state.orphaned[lease.lease_id]
    lease.request_id = pending.request_id
    into = pending.starting if lease.phase is Phase.STARTING else pending.ready
    into[lease.lease_id] = None
    state.unsettled[pending.request_id] = None


def attach_orphans(state: State, pending: PendingRequest) -> None:
    """Attach the orphaned leases of the request's account and class to it, as many as it wants."""
    for lease_id in list(state.orphaned):
        if pending.wanted == 0:
            return
        lease = state.leases[lease_id]
        if lease.account == pending.account and lease.class_key == pending.request.class_key:
            attach(state, lease, pending)
            pending.wanted -= 1


def detach(state: State, lease: LeaseState, *, requeue: bool = True) -> PendingRequest | None:
    """Detach an ending lease from its request, which then wants another one if ``requeue``."""
    state.starting.discard(lease)
    state.idle.pop(lease.lease_id, None)
    state.orphaned.pop(lease.lease_id, None)
    pending = state.pending.get(lease.request_id)
    if pending is None or lease.phase not in (Phase.STARTING, Phase.READY):
        return None
    pending.starting.pop(lease.lease_id, None)
    pending.ready.pop(lease.lease_id, None)
    state.unsettled[pending.request_id] = None
    lease.request_id = ""
    if requeue:
        pending.wanted += 1
        state.queue.add(pending)
    return pending


def release(
    state: State, lease: LeaseState, outbox: Outbox, *, kill: bool, reason: str, notify: bool
) -> None:
    """End a lease, and ``notify`` its owner; its resources are free when the nodelet confirms."""
    was_granted = lease.phase is Phase.HELD
    if lease.phase is not Phase.RELEASING:
        if lease.phase is not Phase.HELD:
            kill = True  # nobody knows yet what its worker has begun
        detach(state, lease)
        lease.move(Phase.RELEASING)
        lease.idle = False
    elif lease.kill or not kill:
        return
    lease.kill = kill
    outbox.append(
        ReleaseLease(lease_id=lease.lease_id, node_id=lease.node_id, kill=kill, reason=reason)
    )
    if was_granted and notify:
        outbox.append(Lost(owner_id=lease.owner_id, lease_ids=(lease.lease_id,)))


def mark_lost(state: State, lease: LeaseState, outbox: Outbox) -> None:
    """Remove a lease whose worker or node is gone, and notify its owner."""
    if lease.phase is Phase.HELD:
        outbox.append(Lost(owner_id=lease.owner_id, lease_ids=(lease.lease_id,)))
    remove_lease(state, lease)


def set_blocked(state: State, lease: LeaseState, blocked: bool) -> None:
    """Free the lease's CPU while its worker waits in ``get``, or allocate it again."""
    if lease.blocked is blocked or lease.phase is Phase.RELEASING:
        return
    cpu = dict(lease.requirements.items).get(CPU, 0)
    lease.blocked = blocked
    if not cpu:
        return
    sign = 1 if blocked else -1
    node = state.nodes[lease.node_id]
    node.available[CPU] = node.available.get(CPU, 0) + sign * cpu
    state.charge(lease.account, ((CPU, cpu),), -sign)
    state.mark_dirty(lease.node_id)


def grant(state: State, pending: PendingRequest, outbox: Outbox) -> None:
    """Grant the leases of ``pending`` that are ready; those still starting become orphaned."""
    granted = tuple(pending.ready)
    for lease_id in granted:
        lease = state.leases[lease_id]
        lease.move(Phase.HELD)
        set_expiry(state, lease)
    pending.ready.clear()
    end_request(state, pending)
    remember_answer(state, pending.request_id, granted)
    outbox.append(Reply(request_id=pending.request_id, lease_ids=granted))


def end_wait(state: State, pending: PendingRequest, outbox: Outbox, note: str) -> None:
    """Answer ``pending``, whose wait has passed, with no lease; its position is kept for a while."""
    position = 0
    if pending.wanted:
        position = state.queue.position(pending)
        state.queue.keep_seniority(pending, state.at_s)
    end_request(state, pending)
    outbox.append(
        Reply(request_id=pending.request_id, lease_ids=(), queue_position=position, note=note)
    )


def reject(
    state: State, pending: PendingRequest, reason: RejectReason, text: str, outbox: Outbox
) -> None:
    """Answer ``pending`` with an error."""
    end_request(state, pending)
    outbox.append(Reject(request_id=pending.request_id, reason=reason, text=text))


def end_request(state: State, pending: PendingRequest) -> None:
    """Remove a request; its leases are orphaned: its owner's next request may get them."""
    for lease_id in (*pending.starting, *pending.ready):
        lease = state.leases[lease_id]
        lease.request_id = ""
        state.orphaned[lease_id] = None
        if lease.phase is Phase.READY:
            state.set_timer(state.at_s + state.policy.lease_ttl_s, Timer.ORPHAN, lease_id)
    pending.starting.clear()
    pending.ready.clear()
    state.queue.discard(pending)
    del state.pending[pending.request_id]
    state.unsettled.pop(pending.request_id, None)


def set_expiry(state: State, lease: LeaseState) -> None:
    """Have the lease expire if its owner does not renew it; the gcs's never do."""
    if lease.owner_id != GCS_OWNER:
        lease.expires_at_s = state.at_s + state.policy.lease_ttl_s
        state.set_timer(lease.expires_at_s, Timer.EXPIRY, lease.lease_id)


def lease_id_of(request_id: str, term: str, number: int) -> str:
    """Return a lease's id, made from its request's: ``r_ab`` -> ``l_ab.1.2f``.

    A later scheduler that adopts the lease so knows which request it has answered.
    """
    return f"l_{request_id.removeprefix('r_')}.{term}.{number:x}"


def request_id_of(lease_id: str) -> str:
    """Return the id of the request for which a lease was assigned."""
    return "r_" + lease_id.removeprefix("l_").rsplit(".", 2)[0]


def remember_answer(state: State, request_id: str, lease_ids: tuple[str, ...]) -> None:
    """Keep the answer to a request for as long as its leases live, and a while at least."""
    answers = state.answers
    answers[request_id] = Answer(state.at_s, lease_ids)
    for oldest_id in list(itertools.islice(answers, 2)):
        oldest = answers[oldest_id]
        if oldest.at_s >= state.at_s - state.policy.remember_answers_s:
            return
        del answers[oldest_id]
        if any(lease_id in state.leases for lease_id in oldest.lease_ids):
            answers[oldest_id] = Answer(state.at_s, oldest.lease_ids)


def must_kill(lease: LeaseState) -> bool:
    """Return whether the lease's worker serves it alone, so that no other lease may have it."""
    return lease.kind is not Kind.TASK
