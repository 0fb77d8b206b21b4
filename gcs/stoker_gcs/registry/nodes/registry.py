"""The registry of nodes: applies ``nodes.rules`` to registrations, heartbeats and silence.

Heartbeats are entries of the ephemeral store and no events: SQL has only what they led to. The sweep
runs on the leading replica. A node whose heartbeat reached any replica within ``dead_after_s`` is not
declared dead, and the sweep first checks that its own process was not stopped.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.nodes import rules
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, WriteConflict
from stoker_wire.errors import StokerError
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.messages.cluster import Cordon, Drain, Node, NodeState, RegisteredNode
from stoker_wire.messages.events import EventKind, payload_as

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition
    from stoker_wire.messages.cluster import (
        ChangeTaints,
        CordonNode,
        DrainNode,
        Heartbeat,
        RegisterNode,
    )
    from stoker_wire.messages.control import Event, ListQuery, Page
    from stoker_wire.messages.node_api import ReportBuilds
    from stoker_wire.settings import Settings

_log = logging.getLogger(__name__)
HEARTBEATS = "heartbeats"
"""The kind of the entries."""
SWEEPS_PER_SUSPICION = 6


class LastHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """The last heartbeat of a node, as the ephemeral store has it."""

    incarnation: int
    at_s: float
    usage: dict[str, float] = {}


_decoder = TolerantDecoder(LastHeartbeat)
_encode = msgspec.msgpack.Encoder().encode


class NodeRegistry:
    """Nodes by id. ``view`` has every node as of the events applied so far; it is never replaced."""

    def __init__(self, state: StateStore, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.view: dict[str, Node] = {}
        self._heartbeats: dict[str, LastHeartbeat] = {}
        self._registering = asyncio.Lock()
        self._listening_since_s = state.now()

    async def load(self) -> None:
        """Fill the view from SQL."""
        self._listening_since_s = self._state.now()
        for node in await self._state.all(NODES):
            self.view[node.node_id] = node

    def apply_event(self, event: Event) -> None:
        """Update the view from an event of the log."""
        node = payload_as(event, Node)
        if node is not None:
            known = self.view.get(node.node_id)
            if known is not None and node.incarnation < known.incarnation:
                return
            if event.kind == EventKind.NODE_DELETED:
                if known is not None and known.state is NodeState.DEAD:  # not registered again
                    del self.view[node.node_id]
                    self._heartbeats.pop(node.node_id, None)
            else:
                self.view[node.node_id] = node

    async def register(self, body: RegisterNode) -> RegisteredNode:
        """Register a node under a new incarnation, which fences everything of the previous ones.

        ConflictError while another node that lives has its URL.
        """
        rules.check(body)
        async with self._registering:
            await self._supersede_at_url(body)
            return await self._write_registration(body)

    async def _supersede_at_url(self, body: RegisterNode) -> None:
        """Declare a silent node at the URL of ``body`` dead; ConflictError if one lives there.

        Reads SQL, since another replica may have registered a node a moment ago.
        """
        await self._read_heartbeats()
        states = (NodeState.ALIVE.value, NodeState.SUSPECT.value)
        for node in await self._state.all(NODES, {"state": states}):
            if node.url != body.url or node.node_id == body.node_id:
                continue
            last_heartbeat_s = self._last_heartbeat_s(node)
            # A gcs that has just started has received no heartbeat of nodes that were there before it.
            silent_s = self._state.now() - max(last_heartbeat_s, self._listening_since_s)
            reason = rules.superseded(
                node, body, silent_s, suspect_after_s=self._settings.suspect_after_s
            )
            await self._transition(node, NodeState.DEAD, reason, last_heartbeat_s)

    async def _write_registration(self, body: RegisterNode) -> RegisteredNode:
        while True:
            row = await self._state.find(NODES, body.node_id)
            before = None if row is None else row.record
            node = rules.registered(body, before, self._state.now())
            operation = NODES.insert(node) if row is None else NODES.update(row, node)
            event = self._state.event(EventKind.NODE_REGISTERED, node.node_id, node)
            try:
                await self._state.writer.apply(Change((operation,), (event,)))
            except WriteConflict:
                continue
            self._record_heartbeat(
                node.node_id, LastHeartbeat(node.incarnation, node.heartbeat_at_s)
            )
            self.view[node.node_id] = node
            return RegisteredNode(
                node_id=node.node_id,
                incarnation=node.incarnation,
                heartbeat_s=self._settings.heartbeat_s,
            )

    async def heartbeat(self, node_id: str, body: Heartbeat) -> None:
        """Record a heartbeat; FencedError if the incarnation is over."""
        node = self.view.get(node_id)
        if node is None or node.incarnation != body.incarnation or node.state is NodeState.DEAD:
            # The view may lag behind SQL by an event; only SQL may fence a node.
            node = await self._state.get(NODES, node_id)
            rules.check_incarnation(node, body.incarnation)
        self._record_heartbeat(
            node_id, LastHeartbeat(body.incarnation, self._state.now(), body.usage)
        )
        if node.state is NodeState.SUSPECT:
            await self._transition(node, NodeState.ALIVE, "heartbeats are back", self._state.now())
        warm = body.warm_kernels
        if warm is not None and warm != node.warm_kernels:
            await self._state.change(
                NODES,
                node_id,
                lambda current: rules.warmed(current, warm, incarnation=body.incarnation),
            )
        devices = body.devices
        if devices is not None and devices != node.devices:
            await self._state.change(
                NODES,
                node_id,
                lambda current: rules.with_devices(current, devices, incarnation=body.incarnation),
            )

        conditions = body.conditions
        if conditions is not None:
            await self._state.change(
                NODES,
                node_id,
                lambda current: rules.with_conditions(
                    current, conditions, incarnation=body.incarnation, now_s=self._state.now()
                ),
            )

    async def record_builds(self, body: ReportBuilds) -> None:
        """Write what a node installs into the event log."""
        events = tuple(
            self._state.event(rules.BUILD_KINDS[build.state], build.job_id, build)
            for build in body.builds
        )
        if events:
            await self._state.writer.apply(Change(events=events))

    def _record_heartbeat(self, node_id: str, heartbeat: LastHeartbeat) -> None:
        self._heartbeats[node_id] = heartbeat
        ttl_s = self._settings.dead_after_s * 2
        self._state.ephemeral.put(HEARTBEATS, node_id, _encode(heartbeat), ttl_s)

    async def leave(self, node_id: str, incarnation: int | None) -> None:
        """Deregister a node: it is dead at once."""
        node = await self._state.get(NODES, node_id)
        if incarnation is not None and node.state is not NodeState.DEAD:
            rules.check_incarnation(node, incarnation)
        at_s, given = self._state.now(), node.incarnation
        await self._state.change(NODES, node_id, lambda current: rules.left(current, given, at_s))

    async def cordon(self, node_id: str, body: CordonNode, *, user: str) -> Node:
        """Have nothing more placed on a node; the first order counts."""
        order = Cordon(by=user, at_s=self._state.now(), reason=body.reason)
        return await self._state.change(NODES, node_id, lambda node: rules.cordoned(node, order))

    async def uncordon(self, node_id: str) -> Node:
        """Have work placed on a node again."""
        return await self._state.change(NODES, node_id, rules.uncordoned)

    async def drain(self, node_id: str, body: DrainNode, *, user: str) -> Node:
        """Have a node emptied; again changes the deadline."""
        now_s = self._state.now()
        order = Drain(
            by=user, began_at_s=now_s, deadline_at_s=now_s + body.deadline_s, reason=body.reason
        )
        return await self._state.change(NODES, node_id, lambda node: rules.draining(node, order))

    async def hand_over(self, node_id: str, to_node_id: str) -> Node:
        """Note which node takes over the objects of one that is drained."""
        return await self._state.change(
            NODES, node_id, lambda node: rules.hands_over(node, to_node_id)
        )

    async def taint(self, node_id: str, body: ChangeTaints) -> Node:
        """Change a node's taints."""
        now_s = self._state.now()
        return await self._state.change(
            NODES, node_id, lambda node: rules.tainted(node, body, now_s)
        )

    async def lose(self, node: Node, reason: str) -> None:
        """Declare this incarnation of a node dead."""
        await self._transition(node, NodeState.DEAD, reason, self._last_heartbeat_s(node))

    def silent_for(self, seconds: float) -> set[str]:
        """Return the nodes that live, as far as is known, and have sent no heartbeat for so long."""
        before_s = self._state.now() - seconds
        heard = {i for i, last in self._heartbeats.items() if last.at_s >= before_s}
        return {
            node_id
            for node_id in self.view.keys() - heard
            if self.view[node_id].state is not NodeState.DEAD
            and self._last_heartbeat_s(self.view[node_id]) < before_s
        }

    async def delete(self, node: Node) -> bool:
        """Delete the record of a dead node; False if it has registered again."""
        where: dict[str, Condition] = {
            "node_id": node.node_id,
            "incarnation": node.incarnation,
            "state": NodeState.DEAD.value,
        }
        event = self._state.event(EventKind.NODE_DELETED, node.node_id, node)
        gone = Delete(schema.NODES, where, must_exist=True)
        try:
            await self._state.writer.apply(Change((gone,), (event,)))
        except WriteConflict:
            return False
        return True

    async def _transition(
        self, node: Node, to: NodeState, reason: str, last_heartbeat_s: float
    ) -> None:
        await self._state.change(
            NODES,
            node.node_id,
            lambda current: rules.moved(
                current,
                to,
                incarnation=node.incarnation,
                reason=reason,
                heartbeat_at_s=last_heartbeat_s,
            ),
        )

    def with_heartbeat(self, node: Node) -> Node:
        """Return the node with its last heartbeat and usage in it."""
        last = self._heartbeats.get(node.node_id)
        if last is None or last.incarnation != node.incarnation:
            return node
        at_s = self._last_heartbeat_s(node)
        return msgspec.structs.replace(node, heartbeat_at_s=at_s, usage=last.usage)

    def _last_heartbeat_s(self, node: Node) -> float:
        last = self._heartbeats.get(node.node_id)
        if last is None or last.incarnation != node.incarnation:
            return node.heartbeat_at_s
        return max(node.heartbeat_at_s, last.at_s)

    async def page(self, query: ListQuery, state: str | tuple[str, ...]) -> Page[Node]:
        """Return a page of nodes, with their latest usage."""
        await self._read_heartbeats()
        page = await self._state.page(NODES, query, {"state": state})
        return msgspec.structs.replace(
            page, items=tuple(self.with_heartbeat(node) for node in page.items)
        )

    async def latest(self) -> list[Node]:
        """Return all nodes, with their latest usage."""
        await self._read_heartbeats()
        return [self.with_heartbeat(node) for node in self.view.values()]

    async def get(self, node_id: str) -> Node:
        """Return a node, with its latest usage."""
        await self._read_heartbeats()
        return self.with_heartbeat(await self._state.get(NODES, node_id))

    async def _read_heartbeats(self) -> None:
        if not self._state.ephemeral.shared:
            return
        for node_id, raw in (await self._state.ephemeral.all(HEARTBEATS)).items():
            last = _decoder.decode(raw)
            known = self._heartbeats.get(node_id)
            if known is None or (last.incarnation, last.at_s) > (known.incarnation, known.at_s):
                self._heartbeats[node_id] = last

    async def sweep(self) -> None:
        """Declare silent nodes SUSPECT, then DEAD, until cancelled; runs on the leading replica."""
        loop = asyncio.get_running_loop()
        every_s = self._settings.suspect_after_s / SWEEPS_PER_SUSPICION
        # Silence that began before this process could receive heartbeats does not count.
        listening_at_s, last = self._state.now(), loop.time()
        waits = False
        while True:
            await asyncio.sleep(every_s)
            late_s, last = loop.time() - last - every_s, loop.time()
            if late_s > self._settings.suspect_after_s / 2:
                _log.warning("the sweep was held up for %.1f s: no node is blamed for it", late_s)
                listening_at_s = self._state.now()
            try:
                await self._sweep_once(listening_at_s)
                waits = False
            except StokerError as error:
                if not waits:
                    _log.warning("the sweep of nodes waits: %s", error)
                waits = True
            except Exception:
                _log.exception("the sweep of nodes failed; it goes on")

    async def _sweep_once(self, listening_at_s: float) -> None:
        await self._read_heartbeats()
        now = self._state.now()
        for node in list(self.view.values()):
            if node.state is NodeState.DEAD:
                continue
            at_s = self._last_heartbeat_s(node)
            silent_s = now - max(at_s, listening_at_s)
            to = rules.verdict(
                node,
                silent_s,
                suspect_after_s=self._settings.suspect_after_s,
                dead_after_s=self._settings.dead_after_s,
            )
            if to is not node.state:
                recovered = to is NodeState.ALIVE
                reason = (
                    "heartbeats are back" if recovered else f"no heartbeat for {silent_s:.1f} s"
                )
                await self._transition(node, to, reason, at_s)
