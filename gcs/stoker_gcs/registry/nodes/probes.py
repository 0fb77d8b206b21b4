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
PAUSE_S = 1.0
"""Pause between two probes of one node."""


class NodeProbes:
    """The connections of nodelets that this replica has, and the probes of those that were lost."""

    def __init__(self, nodes: NodeRegistry, settings: Settings) -> None:
        self._nodes = nodes
        self._silent_s = settings.suspect_after_s / 2
        self._connections: dict[str, web.Request] = {}
        self._probed: dict[str, float] = {}

    def watches(self, node_id: str, request: web.Request) -> None:
        """Note that a nodelet holds a connection for as long as it lives."""
        self._connections[node_id] = request

    async def run(self) -> None:
        """Probe nodes that may be dead, until cancelled; runs on the leading replica."""
        loop = asyncio.get_running_loop()
        listening_at_s = loop.time()
        while True:
            await asyncio.sleep(EVERY_S)
            now_s = loop.time()
            doubtful = self._lost_connections()
            if now_s - listening_at_s > self._silent_s:
                # Before that no node could have been heard by this process.
                doubtful |= self._nodes.silent_for(self._silent_s)
            doubtful = {i for i in doubtful if now_s - self._probed.get(i, 0.0) >= PAUSE_S}
            if doubtful:
                self._probed = {i: at for i, at in self._probed.items() if now_s - at < PAUSE_S}
                self._probed |= dict.fromkeys(doubtful, now_s)
                await asyncio.gather(*(self._probe(node_id) for node_id in sorted(doubtful)))

    def _lost_connections(self) -> set[str]:
        lost = {i for i, request in self._connections.items() if request.transport is None}
        for node_id in lost:
            del self._connections[node_id]
        return lost

    async def _probe(self, node_id: str) -> None:
        node = self._nodes.view.get(node_id)
        if node is None or node.state is NodeState.DEAD or not await refuses_connections(node.url):
            return
        try:
            await self._nodes.lose(node, f"its host refuses connections at {node.url}")
        except StokerError:
            return  # the database is away: the next probe finds the same
