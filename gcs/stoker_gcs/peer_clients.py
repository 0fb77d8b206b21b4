"""Calls from the gcs to the leading scheduler and to the nodelets, all bounded in time.

A peer that is not there becomes an UnavailableError that names it; nothing here retries for long,
since the callers (loops, proxied requests) know how long they may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from stoker_gcs.state.schema import SCHEDULER
from stoker_wire.errors import NotFoundError, StokerError, UnavailableError
from stoker_wire.http.client.pool import ClientPool, LeaderClient
from stoker_wire.messages.cluster import Node, NodeState, Worker
from stoker_wire.messages.control import Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from stoker_wire.http.auth import Credential
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.control import Leader
    from stoker_wire.settings import Settings

T = TypeVar("T")
CALL_S = 5.0
LEADER_CHECK_S = 0.5
FAN_OUT = 32


class LeaderLookup(Protocol):
    """The part of a leader election that finds leaders."""

    def last_known(self, name: str) -> Leader | None:
        """Return the leader as of the events applied so far, perhaps no longer leading."""
        ...

    async def current(self, name: str) -> Leader:
        """Return the leader; UnavailableError while there is none."""
        ...


class PeerClients:
    """One pooled client per peer URL. ``nodes`` is the live view of the node registry."""

    def __init__(
        self,
        leaders: LeaderLookup,
        nodes: Mapping[str, Node],
        settings: Settings,
        credential: Credential,
    ) -> None:
        self._leaders = leaders
        self._nodes = nodes
        self._pool = ClientPool(
            token=credential, peer="gcs", settings=settings, max_connections=2048
        )
        self._leader = LeaderClient(
            SCHEDULER,
            self._pool,
            self._scheduler_url,
            last_known=self._last_known_url,
            fail_over=True,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    def client(self, url: str) -> Client:
        """Return the client of a URL; many long polls may run on one."""
        return self._pool.client(url)

    def _last_known_url(self) -> str:
        known = self._leaders.last_known(SCHEDULER)
        return known.url if known is not None and known.expires_at_s > 0 else ""

    async def _scheduler_url(self, _: bool) -> str:
        return (await self._leaders.current(SCHEDULER)).url

    @overload
    async def call_scheduler(self, method: str, path: str, body: object = None) -> None: ...
    @overload
    async def call_scheduler(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[T],
        query: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_S,
    ) -> T: ...
    async def call_scheduler(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[Any] | None = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_S,
    ) -> Any:
        """Call the leading scheduler; call the next one if that fails, or another leads meanwhile.

        A frozen one keeps its connections, and would answer a long poll never. What is called in this way
        may be repeated.
        """

        async def call() -> tuple[Any, StokerError | None]:
            try:
                return await self._leader.call(
                    method, path, body, reply=reply, query=query, timeout_s=timeout_s, retry=False
                ), None
            except StokerError as error:
                return None, error

        while True:
            called = self._last_known_url()
            async with asyncio.TaskGroup() as group:
                calling = group.create_task(call())
                while not calling.done():
                    await asyncio.wait({calling}, timeout=LEADER_CHECK_S)
                    if called and self._last_known_url() not in (called, ""):
                        break
                calling.cancel()
            if not calling.cancelled():
                answer, error = calling.result()
                if error is not None:
                    raise error
                return answer

    def nodelet(self, node_id: str) -> Client:
        """Return the client of a node's nodelet; NotFoundError or UnavailableError name the node."""
        node = self._nodes.get(node_id)
        if node is None:
            raise NotFoundError(f"there is no node {node_id!r}")
        if node.state is NodeState.DEAD:
            raise UnavailableError(f"node {node_id} is dead ({node.reason})")
        return self.client(node.url)

    def live_nodes(self) -> list[Node]:
        """Return the nodes that may answer."""
        return [node for node in self._nodes.values() if node.state is not NodeState.DEAD]

    async def ask_nodelets(self, ask: Callable[[Node, Client], Awaitable[T]]) -> dict[str, T]:
        """Ask all live nodelets, a bounded number at a time; omit those that fail."""
        replies: dict[str, T] = {}
        slots = asyncio.Semaphore(FAN_OUT)

        async def ask_one(node: Node) -> None:
            async with slots:
                try:
                    async with asyncio.timeout(CALL_S):
                        replies[node.node_id] = await ask(node, self.client(node.url))
                except (StokerError, TimeoutError):
                    return

        async with asyncio.TaskGroup() as group:
            for node in self.live_nodes():
                group.create_task(ask_one(node))
        return replies

    async def workers(self) -> list[Worker]:
        """Return the workers of all nodelets that answer."""

        async def ask(_: Node, client: Client) -> Page[Worker]:
            return await client.call(
                "GET", "/v1/workers", reply=Page[Worker], query={"limit": 1000}, retry=False
            )

        pages = await self.ask_nodelets(ask)
        return [worker for page in pages.values() for worker in page.items]
