"""Nodes that join, change and are lost, and the leases that a new leader adopts from them.

Handlers of ``machine``. A lease lives on one incarnation of its node: when that ends, it is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, ReleaseLease
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import (
    add_lease,
    mark_lost,
    remember_answer,
    request_id_of,
    set_expiry,
)
from stoker_scheduler.core.model.nodes import Health, NodeInfo, NodeSpec
from stoker_scheduler.core.queueing.queue import account_of

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
            _change_node(state, known, spec)
            return
        _remove_node(state, known, outbox)
    if spec.health is Health.DEAD:
        return
    state.nodes[spec.node_id] = NodeInfo(spec)
    state.mark_dirty(spec.node_id)
    state.nodes_changed()


def node_changed(state: State, event: ev.NodeChanged, outbox: Outbox) -> None:
    """Apply a known node's new spec."""
    node = state.nodes.get(event.spec.node_id)
    if node is None or event.spec.incarnation != node.spec.incarnation:
        return
    if event.spec.health is Health.DEAD:
        _remove_node(state, node, outbox)
    else:
        _change_node(state, node, event.spec)


def _change_node(state: State, node: NodeInfo, spec: NodeSpec) -> None:
    node.change(spec)
    state.mark_dirty(node.node_id)
    state.nodes_changed()


def node_lost(state: State, event: ev.NodeLost, outbox: Outbox) -> None:
    """Remove a node; its leases are lost."""
    node = state.nodes.get(event.node_id)
    if node is not None and event.incarnation in (0, node.spec.incarnation):
        _remove_node(state, node, outbox)


def _remove_node(state: State, node: NodeInfo, outbox: Outbox) -> None:
    for lease_id in list(node.leases):
        mark_lost(state, state.leases[lease_id], outbox)
    for requirements in [
        requirements
        for requirements, reservation in state.reserved.items()
        if reservation.node_id == node.node_id
    ]:
        del state.reserved[requirements]
    del state.nodes[node.node_id]
    state.mark_dirty(node.node_id)
    state.nodes_changed()


def lease_adopted(state: State, event: ev.LeaseAdopted, outbox: Outbox) -> None:
    """Add a lease of the leader before, as the answer to its request."""
    node = state.nodes.get(event.node_id)
    if node is None or node.spec.incarnation != event.incarnation or event.lease_id in state.leases:
        return
    free = node.devices.free_by_device
    fits = all(free.get(index, 0) >= units for index, units in event.gpus.items())
    if not fits or sum(event.gpus.values()) != event.requirements.gpu:
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
    lease = LeaseState(
        lease_id=event.lease_id,
        owner_id=event.owner_id,
        account=account_of(event.owner_id, event.job_id),
        job_id=event.job_id,
        kind=event.kind,
        node_id=event.node_id,
        incarnation=event.incarnation,
        requirements=event.requirements,
        gpus=event.gpus,
        class_key="",
        priority=0,
        granted_at_s=event.granted_at_s,
        phase=Phase.HELD,
        request_id=request_id,
        blocked=event.blocked,
        actor_id=event.actor_id,
        name=event.name,
    )
    add_lease(state, lease, node)
    known = state.answers.get(request_id)
    remember_answer(
        state, request_id, (*(known.lease_ids if known is not None else ()), lease.lease_id)
    )
    set_expiry(state, lease)
