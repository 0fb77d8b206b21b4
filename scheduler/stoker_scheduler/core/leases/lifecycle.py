"""The moves of a lease and of a request: assigned, started, granted, released, lost.

Each function makes one move and leaves the state's accounts balanced (``State.check``); ``machine``
and ``timers`` decide when. A lease is granted in :func:`grant` and nowhere else.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import (
    HoldBundles,
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
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.groups import make_place
from stoker_scheduler.core.model.resources import CPU
from stoker_scheduler.core.placement.gang import gpus_together
from stoker_scheduler.core.placement.scoring import NODE_ORDERS
from stoker_scheduler.core.queueing.queue import GCS_OWNER, PendingRequest
from stoker_scheduler.core.state import Answer, State, Timer

if TYPE_CHECKING:
    from collections.abc import Collection

    from stoker_scheduler.core.model.groups import PlacementGroup
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.placement.gang import GangPlacement


def assign(
    state: State,
    pending: PendingRequest,
    requirements: Requirements,
    place: NodeInfo,
    outbox: Outbox,
) -> None:
    """Allocate one lease of ``pending`` at ``place``, where it fits, and have its worker started.

    The caller counts ``wanted``.
    """
    lease = _new_lease(state, pending, requirements, place)
    if NODE_ORDERS[requirements.policy].takes_turns:
        place.turn = state.next_number()
    if requirements.group_id:
        lease.group_id = requirements.group_id
        lease.bundle = state.leases[place.bundle_lease_id].bundle
    _start(state, pending, lease)
    outbox.append(
        StartWorker(
            lease_id=lease.lease_id,
            request_id=lease.request_id,
            node_id=lease.node_id,
            gpus=lease.gpus,
        )
    )
    reservation = state.reserved.get(requirements) if state.reserved else None
    if reservation is not None and place.node_id in reservation.node_ids:
        unreserve(state, requirements, place.node_id)


def assign_gang(
    state: State, pending: PendingRequest, gang: Gang, placement: GangPlacement, outbox: Outbox
) -> None:
    """Allocate all bundles of ``pending`` where ``placement`` says, and have them held there."""
    on_node: dict[str, list[str]] = {}
    together = gpus_together(state.nodes, gang, placement)
    for index, node_id in placement:
        lease = _new_lease(
            state, pending, gang.bundles[index], state.nodes[node_id], together.get(node_id)
        )
        lease.group_id = pending.request.group_id
        lease.bundle = pending.request.indices[index]
        _start(state, pending, lease)
        on_node.setdefault(node_id, []).append(lease.lease_id)
    for node_id, lease_ids in on_node.items():
        prepare = len(on_node) > 1  # one node does it all or not by itself
        outbox.append(HoldBundles(lease_ids=tuple(lease_ids), node_id=node_id, prepare=prepare))
    state.queue.want(pending, 0)
    if gang in state.reserved:
        cancel_reservation(state, gang)


def _new_lease(
    state: State,
    pending: PendingRequest,
    requirements: Requirements,
    place: NodeInfo,
    among: Collection[int] | None = None,
) -> LeaseState:
    request = pending.request
    return LeaseState(
        lease_id=lease_id_of(request.request_id, state.term, state.next_number()),
        owner_id=request.owner_id,
        account=pending.account,
        job_id=request.job_id,
        kind=request.kind,
        node_id=place.node_id,
        incarnation=place.spec.incarnation,
        requirements=requirements,
        gpus=place.choose(requirements, among) or {},
        class_key=request.class_key,
        priority=request.priority,
        granted_at_s=state.at_s,
        since_s=pending.since_s,
        place=place,
        request_id=request.request_id,
        actor_id=request.actor_id,
        name=request.name,
        preemptible=request.preemptible,
        preemption_grace_s=request.preemption_grace_s,
        effective_priority=pending.effective_priority(state.at_s, state.policy.aging_s)
        if request.preemptible
        else request.priority,
        preemptions=state.preempted.get((pending.account, request.class_key), 0)
        if state.preempted
        else 0,
        owner_node_id=request.owner_node_id,
    )


def _start(state: State, pending: PendingRequest, lease: LeaseState) -> None:
    add_lease(state, lease)
    if state.forced:
        state.forced.pop((lease.account, lease.class_key), None)
    pending.starting[lease.lease_id] = None
    if not lease.requirements.background:
        state.tenants.started(lease.account, state.at_s)
    state.placed += 1


def cancel_reservation(state: State, requirements: Requirements | Gang) -> None:
    """Open the nodes that are reserved for ``requirements`` to all again."""
    for node_id in state.reserved.pop(requirements).node_ids:
        node = state.nodes.get(node_id)
        if node is not None:
            node.reserved_for, node.reserved_names = None, frozenset()
            state.mark_dirty(node_id)


def unreserve(state: State, requirements: Requirements, node_id: str) -> None:
    """Open one of the nodes that are reserved for ``requirements`` to all again."""
    reservation = state.reserved[requirements]
    reservation.node_ids = tuple(other for other in reservation.node_ids if other != node_id)
    node = state.nodes[node_id]
    node.reserved_for, node.reserved_names = None, frozenset()
    state.mark_dirty(node_id)
    if not reservation.node_ids:
        del state.reserved[requirements]


def add_lease(state: State, lease: LeaseState) -> None:
    """Add a new lease to the state, and allocate its resources at its place."""
    place = lease.place
    place.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)
    place.leases[lease.lease_id] = None
    state.leases[lease.lease_id] = lease
    state.count_priority(lease, 1)
    state.lease_index.add(lease.lease_id, lease.belongs_to)
    if lease.phase is Phase.STARTING:
        state.starting.add(lease)
    if lease.preemptible:
        state.preemptible[lease.lease_id] = None
    if lease.requirements.background:
        state.background[lease.lease_id] = None
        state.background_checked.clear()
    if not lease.in_bundle:
        state.charge(lease.account, lease.charged, +1)
        state.mark_allocated(lease.node_id)


def remove_lease(state: State, lease: LeaseState) -> None:
    """Remove a lease from the state, and free its resources."""
    detach(state, lease)
    place = lease.place
    del state.leases[lease.lease_id]
    state.preemptible.pop(lease.lease_id, None)
    state.background.pop(lease.lease_id, None)
    if lease.preempted:
        state.preemptions.ended(lease)
    state.count_priority(lease, -1)
    state.lease_index.discard(lease.lease_id, lease.belongs_to)
    del place.leases[lease.lease_id]
    place.free(lease.requirements, lease.gpus, blocked=lease.blocked)
    if not lease.in_bundle:
        state.charge(lease.account, lease.charged, -1)
        state.mark_freed(lease.node_id, lease.requirements.names)
        return
    state.mark_group(lease.group_id)
    bundle = state.leases[place.bundle_lease_id]
    group = state.groups.get(lease.group_id)
    if group is not None and group.closing and group.is_empty:
        first = next(iter(group.bundles.values()), None)
        if first is not None:
            state.set_timer(state.at_s, Timer.STOP, first.bundle_lease_id)
    if bundle.ended and not place.leases:
        remove_lease(state, bundle)


def attach(state: State, lease: LeaseState, pending: PendingRequest) -> None:
    """Attach an orphaned lease to a request (the caller counts ``wanted``)."""
    del state.orphaned[lease.lease_id]
    lease.request_id = pending.request_id
    into = pending.starting if lease.phase is Phase.STARTING else pending.ready
    into[lease.lease_id] = None
    state.unsettled[pending.request_id] = None


def attach_orphans(state: State, pending: PendingRequest, most: int) -> int:
    """Attach up to ``most`` orphaned leases of the request's account and class to it; count them."""
    attached = 0
    for lease_id in list(state.orphaned):
        if attached == most:
            break
        lease = state.leases[lease_id]
        if lease.account == pending.account and lease.class_key == pending.request.class_key:
            attach(state, lease, pending)
            attached += 1
    return attached


def detach(state: State, lease: LeaseState, *, requeue: bool = True) -> PendingRequest | None:
    """Detach an ending lease from its request, which then wants another one if ``requeue``."""
    lease_id, phase = lease.lease_id, lease.phase
    if phase is Phase.HELD or phase is Phase.RELEASING:
        state.idle.pop(lease_id, None)
        return None
    if phase is Phase.STARTING:
        state.starting.discard(lease)
    state.orphaned.pop(lease_id, None)
    pending = state.pending.get(lease.request_id)
    if pending is None:
        return None
    pending.starting.pop(lease.lease_id, None)
    pending.ready.pop(lease.lease_id, None)
    state.unsettled[pending.request_id] = None
    lease.request_id = ""
    if lease.kind is Kind.BUNDLE:
        disband(state, pending)
    if requeue:
        state.queue.want(pending, 1 if lease.kind is Kind.BUNDLE else pending.wanted + 1)
    return pending


def disband(state: State, pending: PendingRequest) -> None:
    """Give up the bundles of a gang that is not granted; they are released in this step."""
    for lease_id in (*pending.starting, *pending.ready):
        state.leases[lease_id].request_id = ""
        state.incomplete[lease_id] = None
    for bundles in (pending.starting, pending.ready, pending.committing):
        bundles.clear()
    pending.is_committed = False


def release_incomplete(state: State, outbox: Outbox) -> None:
    """Release the bundles of gangs that will not be granted: a gang is held whole or not at all."""
    for lease_id in state.incomplete:
        lease = state.leases.get(lease_id)
        if lease is not None:
            reason = "its placement group cannot be held whole"
            release(state, lease, outbox, kill=True, reason=reason, notify=False)
    state.incomplete.clear()


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
        if lease.kind is Kind.BUNDLE:
            close_bundle(state, lease, outbox, reason)
    elif lease.kill or not kill:
        return
    lease.kill = kill
    outbox.append(
        ReleaseLease(lease_id=lease.lease_id, node_id=lease.node_id, kill=kill, reason=reason)
    )
    if was_granted and notify:
        outbox.append(Lost(owner_id=lease.owner_id, lease_ids=(lease.lease_id,)))


def close_bundle(state: State, bundle: LeaseState, outbox: Outbox, reason: str) -> None:
    """End what is in a bundle whose lease ends; nothing more goes into it."""
    for inside in _withdraw_bundle(state, bundle):
        release(state, inside, outbox, kill=True, reason=reason, notify=True)


def _withdraw_bundle(state: State, bundle: LeaseState) -> list[LeaseState]:
    """Take a bundle that ends out of its group; return the leases that are in it."""
    if bundle.holds is None:
        return []
    group = state.groups.get(bundle.group_id)
    if group is not None and group.bundles.get(bundle.bundle) is bundle.holds:
        del group.bundles[bundle.bundle]
        if group.closing and bundle.stop_reason:
            _inherit_stop(state, group, bundle)
    return [state.leases[lease_id] for lease_id in bundle.holds.leases]


def _inherit_stop(state: State, group: PlacementGroup, bundle: LeaseState) -> None:
    """Have another bundle of a group that is to end stand for all, as this one is gone."""
    place = next(iter(group.bundles.values()), None)
    if place is not None:
        heir = state.leases[place.bundle_lease_id]
        heir.stop_reason = bundle.stop_reason
        wait_s = 0.0 if group.is_empty else state.grace_s(bundle) + state.policy.stop_margin_s
        state.set_timer(state.at_s + wait_s, Timer.STOP, heir.lease_id)


def lease_ended(state: State, lease: LeaseState) -> None:
    """Remove a lease whose end its nodelet has confirmed; a bundle once nothing is in it any more."""
    if lease.holds is not None and lease.holds.leases:
        lease.ended = True
        return
    remove_lease(state, lease)


def mark_lost(state: State, lease: LeaseState, outbox: Outbox) -> None:
    """Remove a lease whose worker or node is gone, and notify its owner."""
    for inside in _withdraw_bundle(state, lease):
        mark_lost(state, inside, outbox)
    if lease.lease_id not in state.leases:
        return  # it had ended before, but for what was in it
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
    place = lease.place
    place.available[CPU] = place.available.get(CPU, 0) + sign * cpu
    if lease.in_bundle:
        state.mark_group(lease.group_id)
        return
    if not lease.requirements.background:
        state.charge(lease.account, ((CPU, cpu),), -sign)
    state.mark_dirty(lease.node_id)


def grant(state: State, pending: PendingRequest, outbox: Outbox) -> None:
    """Grant the leases of ``pending`` that are ready; those still starting become orphaned."""
    granted = tuple(pending.ready)
    for lease_id in granted:
        lease = state.leases[lease_id]
        lease.move(Phase.HELD)
        set_expiry(state, lease, state.policy.unconfirmed_ttl_s)
        if lease.kind is Kind.BUNDLE:
            open_bundle(state, lease)
    pending.ready.clear()
    end_request(state, pending)
    remember_answer(state, pending.request_id, granted)
    outbox.append(Reply(request_id=pending.request_id, lease_ids=granted))


def open_bundle(state: State, bundle: LeaseState) -> None:
    """Let leases of the placement group into a bundle that is held."""
    node = state.nodes[bundle.node_id]
    bundle.holds = make_place(node, bundle.lease_id, bundle.requirements, bundle.gpus)
    group = state.groups[bundle.group_id]
    before = group.bundles.get(bundle.bundle)
    if before is not None:  # one of the leader before, found when this one was on its way
        state.incomplete[before.bundle_lease_id] = None
    group.add(bundle.bundle, bundle.holds)
    state.mark_group(bundle.group_id)


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
    """Remove a request; its leases are orphaned: its owner's next request may get them.

    Bundles are not: they would be a part of a gang, and are released.
    """
    if isinstance(pending.requirements, Gang):
        disband(state, pending)
    for lease_id in (*pending.starting, *pending.ready):
        lease = state.leases[lease_id]
        lease.request_id = ""
        state.orphaned[lease_id] = None
        if lease.phase is Phase.READY:
            state.set_timer(state.at_s + state.policy.lease_ttl_s, Timer.ORPHAN, lease_id)
    pending.starting.clear()
    pending.ready.clear()
    state.queue.want(pending, 0)
    del state.pending[pending.request_id]
    state.request_index.discard(pending.request_id, pending.belongs_to)
    state.unsettled.pop(pending.request_id, None)


def set_expiry(state: State, lease: LeaseState, ttl_s: float) -> None:
    """Have the lease end in ``ttl_s`` at the latest unless its owner lists it before; the gcs's never do.

    Once it is listed it ends with its owner: one that is silent may be busy, or stopped for a while.
    """
    at_s = state.at_s + ttl_s
    if lease.owner_id != GCS_OWNER and at_s < (lease.expires_at_s or math.inf):
        lease.expires_at_s = at_s
        state.set_timer(at_s, Timer.EXPIRY, lease.lease_id)


def lose_owner(state: State, owner_id: str, text: str, outbox: Outbox) -> None:
    """End what an owner, or all owners on a node, have and wait for."""
    for request_id in state.request_index.of(owner_id):
        reject(state, state.pending[request_id], RejectReason.OWNER_LOST, text, outbox)
    for lease_id in state.lease_index.of(owner_id):
        release(state, state.leases[lease_id], outbox, kill=True, reason=text, notify=False)


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
