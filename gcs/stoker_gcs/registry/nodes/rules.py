"""The state machine of a node: pure rules over its record (called by ``nodes.registry``).

==========  ==========================  =========
from        event                       to
==========  ==========================  =========
(none)      registers                   ALIVE
any         registers again             ALIVE, next incarnation
ALIVE       silent for suspect_after_s  SUSPECT
SUSPECT     heartbeat                   ALIVE
ALIVE       silent for dead_after_s     DEAD
SUSPECT     silent for dead_after_s     DEAD
ALIVE       leaves                      DEAD
SUSPECT     leaves                      DEAD
any living  silent, its URL registers   DEAD
any living  leaves as it was drained    DEAD
==========  ==========================  =========

Besides, a living node reports which kernels its cache holds, and which of its GPUs are quarantined; an
operator cordons it, and sets its taints. Both last when it registers again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_wire.amounts import check_parts
from stoker_wire.constraints.taints import MAX_TAINTS, Taint, parse_removal, parse_taint
from stoker_wire.errors import BadRequestError, ConflictError, FencedError
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.cluster import (
    MAX_GPUS,
    ChangeTaints,
    Cordon,
    Device,
    Drain,
    Node,
    NodeState,
    RegisterNode,
)
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.node_api import BuildState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_wire.constraints.conditions import NodeCondition

NODES: RecordTable[Node] = RecordTable(
    schema.NODES,
    Node,
    lambda node: {
        "node_id": node.node_id,
        "state": node.state.value,
        "incarnation": node.incarnation,
        "heartbeat_at_s": node.heartbeat_at_s,
    },
    label="node",
    fences=("incarnation",),
)
TRANSITIONS = {
    NodeState.ALIVE: frozenset({NodeState.SUSPECT, NodeState.DEAD}),
    NodeState.SUSPECT: frozenset({NodeState.ALIVE, NodeState.DEAD}),
    NodeState.DEAD: frozenset[NodeState](),
}
KIND_OF_STATE = {
    NodeState.SUSPECT: EventKind.NODE_SUSPECTED,
    NodeState.ALIVE: EventKind.NODE_RECOVERED,
    NodeState.DEAD: EventKind.NODE_DIED,
}
MAX_AMOUNT = 1e15
"""The limit of any resource of a node; memory is in bytes."""


def check(body: RegisterNode) -> None:
    """Raise BadRequestError for what no node can have; schedulers and peers trust a registration."""
    check_id(body.node_id, Prefix.NODE, field="node_id")
    try:
        parts = urlsplit(body.url)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:
        reachable = False
    if not reachable:
        raise BadRequestError(
            f"url: {body.url[:100]!r} is not an address\nwrite it like http://host:7620",
            field="url",
        )
    check_parts(body.resources, "resources")
    for name, amount in body.resources.items():
        most = MAX_GPUS if name == "GPU" else MAX_AMOUNT
        if not 0 <= amount <= most:
            raise BadRequestError(
                f"resources.{name}: expected an amount from 0 to {most:g}, got {amount:g}",
                field=f"resources.{name}",
            )


def registered(body: RegisterNode, before: Node | None, now_s: float) -> Node:
    """Return the node as of its registration: one incarnation after the one before."""
    given = {name: getattr(body, name) for name in body.__struct_fields__}
    last = max(given.pop("last_incarnation"), 0 if before is None else before.incarnation)
    given["conditions"] = tuple(msgspec.structs.replace(one, at_s=now_s) for one in body.conditions)
    given["taints"] = with_taints(before.taints if before is not None else (), body.taints, now_s)
    return Node(
        **given,
        cordon=None if before is None else before.cordon,
        drain=None if before is None else _drain_left(before),
        incarnation=last + 1,
        state=NodeState.ALIVE,
        registered_at_s=now_s,
        heartbeat_at_s=now_s,
    )


def superseded(
    holder: Node, newcomer: RegisterNode, silent_s: float, *, suspect_after_s: float
) -> str:
    """Return why ``holder`` counts as dead: ``newcomer`` registers at the same URL.

    ConflictError while the holder sends heartbeats: two nodes at one URL would get each other's
    requests. A node that was killed and started again is admitted once its previous incarnation was
    silent long enough.
    """
    if silent_s < suspect_after_s:
        raise ConflictError(
            f"url: {newcomer.url} is in use by the living node {holder.node_id} on "
            f"{holder.hostname}\n"
            f"give this node (on {newcomer.hostname}) an address of its own: set "
            "STOKER_ADVERTISE_HOST to a name or IP that leads to it alone, or STOKER_PORT to "
            "another port",
            field="url",
        )
    return f"no heartbeat for {silent_s:.1f} s, and {newcomer.node_id} registered at its URL"


def moved(
    node: Node, to: NodeState, *, incarnation: int, reason: str, heartbeat_at_s: float
) -> Transition[Node] | None:
    """Move it to state ``to``; None where the table has no such transition or the incarnation is over."""
    if node.incarnation != incarnation or to not in TRANSITIONS[node.state]:
        return None
    then = msgspec.structs.replace(
        node, state=to, reason=reason, heartbeat_at_s=max(node.heartbeat_at_s, heartbeat_at_s)
    )
    return Transition(then, KIND_OF_STATE[to])


BUILD_KINDS = {
    BuildState.INSTALLING: EventKind.ENVIRONMENT_INSTALLING,
    BuildState.READY: EventKind.ENVIRONMENT_READY,
    BuildState.FAILED: EventKind.ENVIRONMENT_FAILED,
}
"""What is told of the environments that a node installs."""


def warmed(
    node: Node, warm_kernels: tuple[str, ...], *, incarnation: int
) -> Transition[Node] | None:
    """Record which kernels its cache holds; None if that is nothing new."""
    if (
        node.incarnation != incarnation
        or node.state is NodeState.DEAD
        or node.warm_kernels == warm_kernels
    ):
        return None
    return Transition(
        msgspec.structs.replace(node, warm_kernels=warm_kernels), EventKind.NODE_WARMED
    )


def with_devices(
    node: Node, devices: tuple[Device, ...], *, incarnation: int
) -> Transition[Node] | None:
    """Record its GPUs, of which some were quarantined or came back; None if that is nothing new."""
    if node.incarnation != incarnation or node.state is NodeState.DEAD or node.devices == devices:
        return None
    before = {device.index for device in node.devices if device.quarantine}
    is_new = any(device.quarantine and device.index not in before for device in devices)
    kind = EventKind.GPU_QUARANTINED if is_new else EventKind.GPU_RELEASED
    return Transition(msgspec.structs.replace(node, devices=devices), kind)


def with_conditions(
    node: Node, conditions: tuple[NodeCondition, ...], *, incarnation: int, now_s: float
) -> Transition[Node] | None:
    """Record under which conditions it takes no new work; None if that is nothing new."""
    known = {(one.kind, one.reason): one for one in node.conditions}
    then = tuple(
        known.get((one.kind, one.reason)) or msgspec.structs.replace(one, at_s=now_s)
        for one in conditions
    )
    if node.incarnation != incarnation or node.state is NodeState.DEAD or node.conditions == then:
        return None
    kind = EventKind.NODE_PRESSED if then else EventKind.NODE_RELIEVED
    return Transition(msgspec.structs.replace(node, conditions=then), kind)


def cordoned(node: Node, cordon: Cordon) -> Transition[Node] | None:
    """Have nothing more placed on it; None if that is so already. ConflictError if it is dead."""
    _check_alive(node, "cordoned")
    if node.cordon is not None:
        return None
    return Transition(msgspec.structs.replace(node, cordon=cordon), EventKind.NODE_CORDONED)


def uncordoned(node: Node) -> Transition[Node] | None:
    """Have work placed on it again; None if that is so already."""
    if (node.cordon is None and node.drain is None) or node.state is NodeState.DEAD:
        return None
    then = msgspec.structs.replace(node, cordon=None, drain=None, objects_at="")
    return Transition(then, EventKind.NODE_UNCORDONED)


def draining(node: Node, drain: Drain) -> Transition[Node] | None:
    """Have it emptied; another order changes the deadline. ConflictError if it is dead."""
    _check_alive(node, "drained")
    if node.drain is not None:
        known = node.drain
        drain = msgspec.structs.replace(
            known, deadline_at_s=drain.deadline_at_s, reason=drain.reason or known.reason
        )
    return Transition(msgspec.structs.replace(node, drain=drain), EventKind.NODE_DRAINING)


def hands_over(node: Node, to_node_id: str) -> Transition[Node] | None:
    """Note which node takes over its objects; None if it is drained no more, or that is known."""
    if node.drain is None or node.state is NodeState.DEAD or node.objects_at == to_node_id:
        return None
    return Transition(msgspec.structs.replace(node, objects_at=to_node_id), EventKind.NODE_DRAINING)


def left(node: Node, incarnation: int, at_s: float) -> Transition[Node] | None:
    """End it as it leaves by itself: that is a drain's end if it is drained."""
    if node.drain is None:
        return moved(
            node,
            NodeState.DEAD,
            incarnation=incarnation,
            reason="left the cluster",
            heartbeat_at_s=at_s,
        )
    if node.incarnation != incarnation or node.state is NodeState.DEAD:
        return None
    # A node that comes back later is open: the cordon was for the drain.
    then = msgspec.structs.replace(
        node,
        state=NodeState.DEAD,
        reason=node.drain.text,
        heartbeat_at_s=max(node.heartbeat_at_s, at_s),
        cordon=None,
        drain=msgspec.structs.replace(node.drain, ended_at_s=at_s),
    )
    return Transition(then, EventKind.NODE_DRAINED)


def _drain_left(before: Node) -> Drain | None:
    """Return the order that still holds for a node that registers again: none if it was carried out."""
    return None if before.drain is None or before.drain.ended_at_s else before.drain


def tainted(node: Node, body: ChangeTaints, now_s: float) -> Transition[Node] | None:
    """Change its taints; None if nothing changes. BadRequestError for what is no taint."""
    _check_alive(node, "tainted")
    try:
        removed = [parse_removal(text) for text in body.remove]
        added = [parse_taint(text) for text in body.add]
    except ValueError as error:
        raise BadRequestError(f"taints: one cannot be read\n{error}", field="add") from None
    kept = [
        taint
        for taint in node.taints
        if not any(taint.key == key and effect in (None, taint.effect) for key, effect in removed)
    ]
    taints = with_taints(kept, added, now_s)
    if len(taints) > MAX_TAINTS:
        raise BadRequestError(f"taints: a node has {MAX_TAINTS} at most", field="add")
    if taints == node.taints:
        return None
    return Transition(msgspec.structs.replace(node, taints=taints), EventKind.NODE_TAINTED)


def with_taints(before: Iterable[Taint], added: Iterable[Taint], now_s: float) -> tuple[Taint, ...]:
    """Return taints with others added; of one key and effect there is one, the latest."""
    taints = {(one.key, one.effect): one for one in before}
    for one in added:
        known = taints.get((one.key, one.effect))
        if known is None or known.value != one.value:
            taints[one.key, one.effect] = msgspec.structs.replace(one, at_s=now_s)
    return tuple(taints.values())


def _check_alive(node: Node, what: str) -> None:
    if node.state is NodeState.DEAD:
        raise ConflictError(f"node {node.node_id} is dead ({node.reason}): it cannot be {what}")


def verdict(
    node: Node, silent_s: float, *, suspect_after_s: float, dead_after_s: float
) -> NodeState:
    """Return the state that a node's silence calls for."""
    if node.state is NodeState.DEAD or silent_s >= dead_after_s:
        return NodeState.DEAD
    return NodeState.SUSPECT if silent_s >= suspect_after_s else NodeState.ALIVE


def check_incarnation(node: Node, incarnation: int) -> None:
    """Raise FencedError for a nodelet whose incarnation is over."""
    if node.incarnation != incarnation or node.state is NodeState.DEAD:
        why = (
            f"was declared dead ({node.reason})"
            if node.state is NodeState.DEAD
            else f"is at incarnation {node.incarnation}"
        )
        raise FencedError(
            f"node {node.node_id} {why}\n"
            f"this request is of incarnation {incarnation}: stop its workers and register again"
        )
