"""Calls from the gcs to the scheduler that leads and to the nodelets, all bounded in time.

A peer that is not there becomes an UnavailableError that names it; nothing here retries for long,
since the callers (loops, proxied requests) know how long they may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from stoker_wire.errors import NotFoundError, StokerError, UnavailableError
from stoker_wire.http.client_pool import ClientPool, LeaderClient
from stoker_wire.messages.cluster import Node, NodeState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from stoker_gcs.controllers.leader_election import Leaders
    from stoker_wire.http.client import Client
    from stoker_wire.settings import Settings

T = TypeVar("T")
SCHEDULER = "scheduler"
CALL_S = 5.0
FAN_OUT = 32


class Links:
    """One pooled client per peer URL. ``nodes`` gives the nodes as last heard of."""

    def __init__(
        self,
        leaders: Leaders,
        nodes: Callable[[], Mapping[str, Node]],
        settings: Settings,
        token: str,
    ) -> None:
        self._leaders = leaders
        self._nodes = nodes
        self._clients = ClientPool(token=token, peer="gcs", settings=settings, max_connections=2048)
        self._leader = LeaderClient(
            SCHEDULER,
            self._clients,
            self._scheduler_url,
            last_known=self._last_known_url,
            fail_over=True,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._clients.close()

    def client(self, url: str) -> Client:
        """The client of a URL; many long polls may run on one."""
        return self._clients.client(url)

    def _last_known_url(self) -> str:
        known = self._leaders.known(SCHEDULER)
        return known.url if known is not None and known.expires_at_s > 0 else ""

    async def _scheduler_url(self, _: bool) -> str:
        return (await self._leaders.current(SCHEDULER)).url

    async def tell_scheduler(self, method: str, path: str, body: object) -> None:
        """Call the scheduler that leads, for the effect alone."""
        await self._leader.call(method, path, body, timeout_s=CALL_S, retry=False)

    async def scheduler(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[T],
        query: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_S,
    ) -> T:
        """Call the scheduler that leads; looks it up again if the one known fails."""
        answer: T = await self._leader.call(
            method, path, body, reply=reply, query=query, timeout_s=timeout_s, retry=False
        )
        return answer

    def nodelet(self, node_id: str) -> Client:
        """The client of a node's nodelet; NotFoundError or UnavailableError name the node."""
        node = self._nodes().get(node_id)
        if node is None:
            raise NotFoundError(f"there is no node {node_id!r}")
        if node.state is NodeState.DEAD:
            raise UnavailableError(f"node {node_id} is dead ({node.reason})")
        return self.client(node.url)

    def living(self) -> list[Node]:
        """The nodes that may answer."""
        return [node for node in self._nodes().values() if node.state is not NodeState.DEAD]

    async def every_nodelet(self, ask: Callable[[Node, Client], Awaitable[T]]) -> dict[str, T]:
        """Ask all living nodelets, a bounded number at a time; those that fail are left out."""
        found: dict[str, T] = {}
        gate = asyncio.Semaphore(FAN_OUT)

        async def one(node: Node) -> None:
            async with gate:
                try:
                    async with asyncio.timeout(CALL_S):
                        found[node.node_id] = await ask(node, self.client(node.url))
                except (StokerError, TimeoutError):
                    return

        async with asyncio.TaskGroup() as group:
            for node in self.living():
                group.create_task(one(node))
        return found
