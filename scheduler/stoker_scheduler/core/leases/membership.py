"""Nodes that join, change and are lost, and the leases that a new leader adopts from them.

Handlers of ``machine``. A lease lives on one incarnation of its node: when that ends, it is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, ReleaseLease
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.evictions import evict
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import (
    add_lease,
    cancel_reservation,
    lose_owner,
    mark_lost,
    open_bundle,
    release,
    remember_answer,
    request_id_of,
    set_expiry,
)
from stoker_scheduler.core.model.groups import follow_node
from stoker_scheduler.core.model.nodes import Health, NodeInfo, NodeSpec
from stoker_scheduler.core.placement.lost_nodes import remember_lost
from stoker_scheduler.core.queueing.queue import account_of
from stoker_scheduler.core.state import Timer

if TYPE_CHECKING:
    from stoker_scheduler.core import events as ev
    from stoker_scheduler.core.state import State


def node_joined(state: State, event: ev.NodeJoined, outbox: Outbox) -> None:
    """Add a node; the leases of an earlier incarnation of it are lost."""
    spec = event.spec
    known = state.nodes.get(spec.node_id)
    if known is not None:
        if spec.incarnation < known.spec.incarnation:
            return
        if spec.incarnation == known.spec.incarnation:
            _change_node(state, known, spec, outbox)
            return
        _remove_node(state, known, outbox)
    if spec.health is Health.DEAD:
        return
    state.lost_nodes.pop(spec.node_id, None)
    node = state.nodes[spec.node_id] = NodeInfo(spec)
    node.answers = state.extender_answers
    state.mark_dirty(spec.node_id)
    state.node_changed(None, spec)


def node_changed(state: State, event: ev.NodeChanged, outbox: Outbox) -> None:
    """Apply a known node's new spec."""
    node = state.nodes.get(event.spec.node_id)
    if node is None or event.spec.incarnation != node.spec.incarnation:
        return
    if event.spec.health is Health.DEAD:
        _remove_node(state, node, outbox)
    else:
        _change_node(state, node, event.spec, outbox)


def _change_node(state: State, node: NodeInfo, spec: NodeSpec, outbox: Outbox) -> None:
    before = node.spec
    node.change(spec)
    for lease_id in node.leases:
        bundle = state.leases[lease_id].holds
        if bundle is not None:
            follow_node(bundle, spec)
    state.mark_dirty(node.node_id)
    state.node_changed(before, spec)
    evict(state, node, outbox)


def node_lost(state: State, event: ev.NodeLost, outbox: Outbox) -> None:
    """Remove a node; its leases are lost."""
    node = state.nodes.get(event.node_id)
    if node is not None and event.incarnation in (0, node.spec.incarnation):
        _remove_node(state, node, outbox)


def rank_slow(state: State, event: ev.RankSlow) -> None:
    """Count a slow rank on its node for a while."""
    node = state.nodes.get(event.node_id)
    if node is not None:
        until_s = state.at_s + state.policy.remember_slow_ranks_s
        node.slow_ranks[event.rank] = until_s
        state.set_timer(until_s, Timer.SLOW_RANK, event.node_id)
        state.mark_dirty(event.node_id)


def _remove_node(state: State, node: NodeInfo, outbox: Outbox) -> None:
    for lease_id in list(node.leases):
        mark_lost(state, state.leases[lease_id], outbox)
    for requirements, reservation in list(state.reserved.items()):
        if node.node_id in reservation.node_ids:
            cancel_reservation(state, requirements)
    del state.nodes[node.node_id]
    remember_lost(state, node)
    state.mark_dirty(node.node_id)
    state.node_changed(node.spec, None)
    lose_owner(state, node.node_id, f"its owner was on node {node.node_id}, which is lost", outbox)


def lease_adopted(state: State, event: ev.LeaseAdopted, outbox: Outbox) -> None:
    """Add a lease of the leader before, as the answer to its request."""
    node = state.nodes.get(event.node_id)
    if node is None or node.spec.incarnation != event.incarnation or event.lease_id in state.leases:
        return
    place: NodeInfo | None = node
    if event.group_id:
        group = state.groups.get(event.group_id)
        if group is None or event.kind is Kind.BUNDLE:
            # Two are held if a gang was given up while the leader changed: one of them.
            gone = group is None or event.bundle in group.bundles or event.bundle in group.released
            place = None if gone else node
        else:
            place = group.bundles.get(event.bundle)
    is_known = place is not None and place.node_id == node.node_id
    unknown_text = f"placement group {event.group_id} does not have bundle {event.bundle} here"
    if not is_known and event.kind is not Kind.BUNDLE:
        outbox.append(
            ReleaseLease(
                lease_id=event.lease_id, node_id=event.node_id, kill=True, reason=unknown_text
            )
        )
        return
    if place is None or not is_known:
        place = node  # until the node has ended it, it has what is the bundle's
    free = place.devices.free_by_device
    fits = all(free.get(index, 0) >= units for index, units in event.gpus.items())
    wanted = event.requirements
    if not fits or not place.devices.serves(event.gpus, wanted.gpu, wanted.gpu_memory):
        outbox.append(
            ReleaseLease(
                lease_id=event.lease_id,
                node_id=event.node_id,
                kill=True,
                reason="its GPUs belong to another lease",
            )
        )
        return
    request_id = request_id_of(event.lease_id)
    account = account_of(event)
    state.tenants.add(account, state.usage)
    lease = LeaseState(
        lease_id=event.lease_id,
        owner_id=event.owner_id,
        account=account,
        job_id=event.job_id,
        kind=event.kind,
        node_id=event.node_id,
        incarnation=event.incarnation,
        requirements=event.requirements,
        gpus=event.gpus,
        class_key="",
        priority=event.priority,
        granted_at_s=event.granted_at_s,
        since_s=event.granted_at_s,
        place=place,
        phase=Phase.HELD,
        request_id=request_id,
        blocked=event.blocked,
        actor_id=event.actor_id,
        name=event.name,
        group_id=event.group_id,
        bundle=event.bundle,
        preemptible=event.preemptible,
        preemption_grace_s=event.preemption_grace_s,
        effective_priority=event.priority,
        owner_node_id=event.owner_node_id,
    )
    add_lease(state, lease)
    if not is_known:
        release(state, lease, outbox, kill=True, reason=unknown_text, notify=False)
        return
    if lease.kind is Kind.BUNDLE:
        open_bundle(state, lease)
    known = state.answers.get(request_id)
    remember_answer(
        state, request_id, (*(known.lease_ids if known is not None else ()), lease.lease_id)
    )
    set_expiry(state, lease, state.policy.unconfirmed_ttl_s)
    evict(state, node, outbox)
