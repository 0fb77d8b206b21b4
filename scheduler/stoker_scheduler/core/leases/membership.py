"""Nodes that come, change and go, and the leases that they bring along.

Handlers of the machine's table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Command, ReleaseLease
from stoker_scheduler.core.leases.lifecycle import lose, occupy, remember_answer, request_id_of
from stoker_scheduler.core.model.nodes import Health, Node, NodeSpec
from stoker_scheduler.core.queueing.queue import GCS_OWNER, account_of
from stoker_scheduler.core.state import LeaseState, Phase, State

if TYPE_CHECKING:
    from stoker_scheduler.core import events as ev

Out = list[Command]


def node_joined(state: State, event: ev.NodeJoined, out: Out) -> None:
    """A node registered; a new incarnation has lost what the old one held."""
    spec = event.spec
    known = state.nodes.get(spec.node_id)
    if known is not None:
        if spec.incarnation < known.spec.incarnation:
            return
        if spec.incarnation == known.spec.incarnation:
            _change_node(state, known, spec)
            return
        _remove_node(state, known, out)
    if spec.health is Health.DEAD:
        return
    state.nodes[spec.node_id] = Node(spec)
    state.touch(spec.node_id)
    state.nodes_changed()


def node_changed(state: State, event: ev.NodeChanged, out: Out) -> None:
    """Adopt a known node's new spec."""
    node = state.nodes.get(event.spec.node_id)
    if node is None or event.spec.incarnation != node.spec.incarnation:
        return
    if event.spec.health is Health.DEAD:
        _remove_node(state, node, out)
    else:
        _change_node(state, node, event.spec)


def _change_node(state: State, node: Node, spec: NodeSpec) -> None:
    node.change(spec)
    state.touch(node.node_id)
    state.nodes_changed()


def node_lost(state: State, event: ev.NodeLost, out: Out) -> None:
    """Drop a node and all that it ran."""
    node = state.nodes.get(event.node_id)
    if node is not None and event.incarnation in (0, node.spec.incarnation):
        _remove_node(state, node, out)


def _remove_node(state: State, node: Node, out: Out) -> None:
    for lease_id in list(node.leases):
        lose(state, state.leases[lease_id], out)
    for need in [need for need, kept in state.reserved.items() if kept.node_id == node.node_id]:
        del state.reserved[need]
    del state.nodes[node.node_id]
    state.touch(node.node_id)
    state.nodes_changed()


def lease_adopted(state: State, event: ev.LeaseAdopted, out: Out) -> None:
    """Enter a lease of the leader before into the books, as the answer to its request."""
    node = state.nodes.get(event.node_id)
    if node is None or node.spec.incarnation != event.incarnation or event.lease_id in state.leases:
        return
    free = node.devices.free
    fits = all(free.get(index, 0) >= units for index, units in event.gpus.items())
    if not fits or sum(event.gpus.values()) != event.need.gpu:
        out.append(
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
        need=event.need,
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
    occupy(state, lease, node)
    known = state.answers.get(request_id)
    remember_answer(
        state, request_id, (*(known.lease_ids if known is not None else ()), lease.lease_id)
    )
    if lease.owner_id != GCS_OWNER:
        lease.expires_at_s = state.at_s + state.policy.lease_ttl_s
        state.set_timer(lease.expires_at_s, "expire", lease.lease_id)
