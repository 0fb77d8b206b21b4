"""Probes of nodes that may be dead: one whose host refuses new connections at its URL has no nodelet.

Silence alone takes ``dead_after_s`` to be a death, as a nodelet may be frozen and its network slow; then the
kernel of its host still accepts connections, or nobody answers. A refusal comes from a host that lives and
has nobody at that port. What gives reason to probe is a lost connection of the nodelet's, or a missed
heartbeat; neither is a death by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_wire.errors import StokerError
from stoker_wire.http.client.refusal import refuses_connections
from stoker_wire.messages.cluster import NodeState

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_wire.settings import Settings

EVERY_S = 0.1
"""Pause between two looks at the connections: what a look costs 100 nodes is 0.1 % of a core."""
SILENCE_EVERY_S = 0.5
"""Pause between two looks for nodes that send no heartbeats."""
PAUSE_S = 1.0
"""Pause between two probes of one node."""
TRIES = 10
"""Probes of a node whose connection was lost: the port of one that was killed may outlive its connections."""
AT_ONCE = 64
"""Probes that are under way at once, at most."""


class NodeProbes:
    """The connections of nodelets that this replica has, and the probes of those that may be dead."""

    def __init__(self, nodes: NodeRegistry, settings: Settings) -> None:
        self._nodes = nodes
        self._silent_s = settings.suspect_after_s / 2
        self._connections: dict[str, web.Request] = {}
        self._probed: dict[str, float] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def watches(self, node_id: str, request: web.Request) -> None:
        """Note the connection of a nodelet; it lasts as long as the nodelet, or is replaced by another."""
        self._connections[node_id] = request

    async def follow_connections(self) -> None:
        """Probe the nodes whose connections to this replica were lost, until cancelled."""
        async with asyncio.TaskGroup() as doubts:
            while True:
                await asyncio.sleep(EVERY_S)
                for node_id in sorted(self._lost_connections()):
                    doubts.create_task(self._settle(node_id))

    async def follow_silence(self) -> None:
        """Probe the nodes that send no heartbeats, until cancelled; runs on the leading replica."""
        # Those that died while no gcs could notice it, though the gcs starts again and again.
        living = (i for i, node in self._nodes.view.items() if node.state is not NodeState.DEAD)
        await self._probe_all(set(living))
        # Before that no node could have been heard by this process.
        await asyncio.sleep(self._silent_s)
        while True:
            await asyncio.sleep(SILENCE_EVERY_S)
            await self._probe_all(self._nodes.silent_for(self._silent_s))

    def _lost_connections(self) -> set[str]:
        lost = {i for i, request in self._connections.items() if request.transport is None}
        for node_id in lost:
            del self._connections[node_id]
        return lost

    async def _settle(self, node_id: str) -> None:
        for _ in range(TRIES):
            if node_id in self._connections or await self._probe(node_id):
                return
            await asyncio.sleep(PAUSE_S)

    async def _probe_all(self, doubtful: set[str]) -> None:
        now_s = asyncio.get_running_loop().time()
        due = {i for i in doubtful if now_s - self._probed.get(i, -PAUSE_S) >= PAUSE_S}
        if due:
            self._probed = {i: at for i, at in self._probed.items() if now_s - at < PAUSE_S}
            self._probed |= dict.fromkeys(due, now_s)
            await asyncio.gather(*(self._probe(node_id) for node_id in sorted(due)))

    async def _probe(self, node_id: str) -> bool:
        """Return whether the node is dead; False if that cannot be said now."""
        node = self._nodes.view.get(node_id)
        if node is None:
            return False
        if node.state is NodeState.DEAD:
            return True
        async with self._at_once:
            if not await refuses_connections(node.url):
                return False
        try:
            await self._nodes.lose(node, f"its host refuses connections at {node.url}")
        except StokerError:
            return False  # the database is away: the next probe finds the same
        return True
