"""Nodes as they come, beat and go: the shell around ``nodes.rules``.

Heartbeats are hot facts and no events: SQL keeps only what they led to. The sweep runs on one replica (see
``leading``). A node that was heard of by anyone within ``dead_after_s`` is not declared dead, and the
sweep first checks that it was not itself asleep.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.nodes import rules
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.store.changes import Change, Clash
from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import Node, NodeState, RegisteredNode

if TYPE_CHECKING:
    from stoker_gcs.state.records import Truth
    from stoker_wire.messages.cluster import Heartbeat, RegisterNode
    from stoker_wire.messages.control import Event, ListQuery, Page
    from stoker_wire.settings import Settings

_log = logging.getLogger("stoker.gcs.nodes")
BEATS = "beats"
SWEEPS_PER_SUSPICION = 6


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """The last heartbeat of a node, as it lies in the hot store."""

    incarnation: int
    at_s: float
    usage: dict[str, float] = {}


_beat = msgspec.msgpack.Decoder(Beat)
_encode = msgspec.msgpack.Encoder().encode


class NodeRegistry:
    """See the module. ``view`` is every node as of the events read so far."""

    def __init__(self, truth: Truth, settings: Settings) -> None:
        self._truth = truth
        self._settings = settings
        self.view: dict[str, Node] = {}
        self._beats: dict[str, Beat] = {}
        self._admitting = asyncio.Lock()
        self._hears_since_s = truth.now()

    async def load(self) -> None:
        """Fill the view from SQL."""
        self._hears_since_s = self._truth.now()
        for node in await self._truth.all(NODES):
            self.view[node.node_id] = node

    def observe(self, event: Event) -> None:
        """Keep the view in step with the log."""
        if event.kind.startswith("node."):
            node = msgspec.convert(event.payload, Node)
            known = self.view.get(node.node_id)
            if known is None or node.incarnation >= known.incarnation:
                self.view[node.node_id] = node

    async def register(self, body: RegisterNode) -> RegisteredNode:
        """Admit a node under a fresh incarnation, which fences all it said before.

        ConflictError while another node that lives has its URL.
        """
        rules.check(body)
        async with self._admitting:
            await self._free_url(body)
            return await self._admit(body)

    async def _free_url(self, body: RegisterNode) -> None:
        """See that no other node lives at the URL of ``body``; one fallen silent is superseded.

        Read from SQL, since another replica may have admitted a node a moment ago.
        """
        await self._hear_others()
        states = (NodeState.ALIVE.value, NodeState.SUSPECT.value)
        for node in await self._truth.all(NODES, {"state": states}):
            if node.url != body.url or node.node_id == body.node_id:
                continue
            heard_at_s = self.seen(node).heartbeat_at_s
            # A gcs that has just started has not heard those that were there before it.
            silent_s = self._truth.now() - max(heard_at_s, self._hears_since_s)
            reason = rules.superseded(
                node, body, silent_s, suspect_after_s=self._settings.suspect_after_s
            )
            await self._move(node, NodeState.DEAD, reason, heard_at_s)

    async def _admit(self, body: RegisterNode) -> RegisteredNode:
        while True:
            kept = await self._truth.find(NODES, body.node_id)
            before = None if kept is None else kept.record
            node = rules.registered(body, before, self._truth.now())
            operation = NODES.insert(node) if kept is None else NODES.update(kept, node)
            event = self._truth.event("node.registered", node.node_id, node)
            try:
                await self._truth.journal.apply(Change((operation,), (event,)))
            except Clash:
                continue
            self._remember(node.node_id, Beat(node.incarnation, node.heartbeat_at_s))
            self.view[node.node_id] = node
            return RegisteredNode(
                node_id=node.node_id,
                incarnation=node.incarnation,
                heartbeat_s=self._settings.heartbeat_s,
            )

    async def heartbeat(self, node_id: str, body: Heartbeat) -> None:
        """Note a sign of life; FencedError if the incarnation is over."""
        node = self.view.get(node_id)
        if node is None or node.incarnation != body.incarnation or node.state is NodeState.DEAD:
            # The view may lag behind SQL by an event; only SQL may fence a node.
            node = await self._truth.get(NODES, node_id)
            rules.check_incarnation(node, body.incarnation)
        self._remember(node_id, Beat(body.incarnation, self._truth.now(), body.usage))
        if node.state is NodeState.SUSPECT:
            await self._move(node, NodeState.ALIVE, "heartbeats are back", self._truth.now())
        warm = body.warm_kernels
        if warm is not None and warm != node.warm_kernels:
            await self._truth.change(
                NODES,
                node_id,
                lambda found: rules.warmed(found, warm, incarnation=body.incarnation),
            )

    def _remember(self, node_id: str, beat: Beat) -> None:
        self._beats[node_id] = beat
        self._truth.hot.put(BEATS, node_id, _encode(beat), self._settings.dead_after_s * 2)

    async def leave(self, node_id: str, incarnation: int | None) -> None:
        """A node says goodbye: dead at once, with nothing left to wait for."""
        node = await self._truth.get(NODES, node_id)
        if incarnation is not None and node.state is not NodeState.DEAD:
            rules.check_incarnation(node, incarnation)
        await self._move(node, NodeState.DEAD, "left the cluster", self._truth.now())

    async def _move(self, node: Node, to: NodeState, reason: str, heard_at_s: float) -> None:
        await self._truth.change(
            NODES,
            node.node_id,
            lambda found: rules.moved(
                found,
                to,
                incarnation=node.incarnation,
                reason=reason,
                heartbeat_at_s=heard_at_s,
            ),
        )

    def seen(self, node: Node) -> Node:
        """The node with its last heartbeat and usage in it."""
        beat = self._beats.get(node.node_id)
        if beat is None or beat.incarnation != node.incarnation:
            return node
        at_s = max(node.heartbeat_at_s, beat.at_s)
        return msgspec.structs.replace(node, heartbeat_at_s=at_s, usage=beat.usage)

    async def page(self, query: ListQuery, state: str | tuple[str, ...]) -> Page[Node]:
        """One page of nodes, with their latest usage."""
        await self._hear_others()
        page = await self._truth.page(NODES, query, {"state": state})
        return msgspec.structs.replace(page, items=tuple(self.seen(node) for node in page.items))

    async def one(self, node_id: str) -> Node:
        """One node, with its latest usage."""
        await self._hear_others()
        return self.seen(await self._truth.get(NODES, node_id))

    async def _hear_others(self) -> None:
        if not self._truth.hot.shared:
            return
        for node_id, raw in (await self._truth.hot.all(BEATS)).items():
            beat = _beat.decode(raw)
            known = self._beats.get(node_id)
            if known is None or (beat.incarnation, beat.at_s) > (known.incarnation, known.at_s):
                self._beats[node_id] = beat

    async def sweep(self) -> None:
        """The leading replica: move silent nodes along, until cancelled."""
        loop = asyncio.get_running_loop()
        every_s = self._settings.suspect_after_s / SWEEPS_PER_SUSPICION
        # Nobody is blamed for silence that began before we could hear.
        awake_at_s, last = self._truth.now(), loop.time()
        while True:
            await asyncio.sleep(every_s)
            late_s, last = loop.time() - last - every_s, loop.time()
            if late_s > self._settings.suspect_after_s / 2:
                _log.warning("the sweep was held up for %.1f s: no node is blamed for it", late_s)
                awake_at_s = self._truth.now()
            try:
                await self._sweep_once(awake_at_s)
            except StokerError as error:
                _log.warning("the sweep of nodes waits: %s", error)
            except Exception:
                _log.exception("the sweep of nodes failed; it goes on")

    async def _sweep_once(self, awake_at_s: float) -> None:
        await self._hear_others()
        now = self._truth.now()
        for node in list(self.view.values()):
            if node.state is NodeState.DEAD:
                continue
            at_s = self.seen(node).heartbeat_at_s
            silent_s = now - max(at_s, awake_at_s)
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
                await self._move(node, to, reason, at_s)
