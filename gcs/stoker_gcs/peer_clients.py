"""Calls from the gcs to the scheduler that leads and to the nodelets, all bounded in time.

A peer that is not there becomes an UnavailableError that names it; nothing here retries for long,
since the callers (loops, proxied requests) know how long they may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from stoker_wire.errors import (
    DeadlineExceededError,
    NotFoundError,
    NotLeaderError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client import Client
from stoker_wire.messages.cluster import Node, NodeState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from stoker_gcs.controllers.leader_election import Leaders
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
        self._settings = settings
        self._token = token
        self._clients: dict[str, Client] = {}

    async def close(self) -> None:
        """Close all connections."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    def client(self, url: str) -> Client:
        """The client of a URL; many long polls may run on one."""
        found = self._clients.get(url)
        if found is None:
            found = self._clients[url] = Client(
                url, token=self._token, peer="gcs", settings=self._settings, max_connections=2048
            )
        return found

    async def tell_scheduler(self, method: str, path: str, body: object) -> None:
        """Call the scheduler that leads, for the effect alone."""
        await self._scheduler(method, path, body, None, None, CALL_S)

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
        """Call the scheduler that leads; looks it up again once if the one known fails."""
        found: T = await self._scheduler(method, path, body, reply, query, timeout_s)
        return found

    async def _scheduler(
        self,
        method: str,
        path: str,
        body: object,
        reply: type[Any] | None,
        query: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> Any:
        known = self._leaders.known(SCHEDULER)
        tried, last = "", ""
        if known is not None and known.expires_at_s > 0:
            tried = known.url
            try:
                return await self._once(tried, method, path, body, reply, query, timeout_s)
            except (UnavailableError, NotLeaderError) as error:
                last = str(error)
        leader = await self._leaders.current(SCHEDULER)
        if leader.url == tried:
            raise UnavailableError(f"the scheduler at {tried} does not answer\n{last}")
        try:
            return await self._once(leader.url, method, path, body, reply, query, timeout_s)
        except (UnavailableError, NotLeaderError) as error:
            raise UnavailableError(
                f"the scheduler at {leader.url} does not answer\n{error}"
            ) from error

    async def _once(
        self,
        url: str,
        method: str,
        path: str,
        body: object,
        reply: type[Any] | None,
        query: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> Any:
        client = self.client(url)
        try:
            if reply is None:
                await client.call(method, path, body, timeout_s=timeout_s, retry=False)
                return None
            return await client.call(
                method, path, body, reply=reply, query=query, timeout_s=timeout_s, retry=False
            )
        except DeadlineExceededError as error:
            raise UnavailableError(
                f"the scheduler at {url} did not answer within {timeout_s:g} s"
            ) from error

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
