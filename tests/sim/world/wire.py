"""What crosses the network of a world, and the product's HTTP client over it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp

from stoker_wire.errors import (
    DeadlineExceededError,
    NotReadyError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.http.client.endpoints import READY_PATH
from stoker_wire.http.client.exchange import REPLICAS_HEADER, ReplyReader, check_status, query_texts
from stoker_wire.http.codec import MSGPACK

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from tests.sim.world.links import Link
    from tests.sim.world.loop import Process
    from tests.sim.world.network import Network

EMPTY: Mapping[str, str] = {}


class Wire:
    """A request as it crosses the network."""

    __slots__ = ("data", "headers", "method", "path", "peer", "query")

    def __init__(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: bytes | None,
        headers: Mapping[str, str],
        peer: str,
    ) -> None:
        self.method, self.path, self.query = method, path, query
        self.data, self.headers, self.peer = data, dict(headers), peer


class KeepAlive:
    """A sign of life on a watch."""


KEEP_ALIVE = KeepAlive()


class _Url(str):
    """A request's target: the text, and the parts of it that are needed again and again."""

    base: str
    path: str
    query: Mapping[str, str]


class SimClient(Client):
    """The product's client, whose requests go over the world's network."""

    _shared_replies = ReplyReader()

    def __init__(self, network: Network, process: Process, url: str, peer: str) -> None:
        super().__init__(url, token="t", peer=peer, settings=network.settings)
        self._network = network
        self._process = process
        self._peer = peer
        self._replies = self._shared_replies
        self._more = {REPLICAS_HEADER: str(len(self.urls))} if len(self.urls) > 1 else EMPTY

    def url_of(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        base = self._endpoints.current
        url = _Url(f"{base}{path}")
        url.base, url.path, url.query = base, path, query_texts(query) if query else EMPTY
        return url

    async def close(self) -> None:
        self._closed = True

    async def _once(
        self, method: str, url: Any, data: Any, headers: dict[str, str], reply: Any, raw: bool
    ) -> Any:
        if self._closed:
            raise UnavailableError(f"the connections to {self.base_url} are closed")
        request = Wire(method, url.path, url.query, data, {**headers, **self._more}, self._peer)
        status, content = await self._network.exchange(self._process, url.base, request)
        check_status(status, content, method=method, url=url)
        if raw or reply is None:
            return content if raw else None
        return self._replies.decode(content, MSGPACK, reply, method=method, url=url)

    async def _is_ready(self, base: str) -> bool:
        request = Wire("GET", READY_PATH, EMPTY, None, EMPTY, self._peer)
        try:
            status, _ = await self._network.exchange(self._process, base, request)
        except aiohttp.ClientError:
            return False
        return status < 300

    async def _connect(self, path: str, query: Mapping[str, str]) -> Link:
        base = self.url
        request = Wire("GET", path, query, None, self._more, self._peer)
        try:
            async with self.attend(base):
                return await self._network.connect(self._process, base, request)
        except aiohttp.ClientConnectionError as error:
            await self._moves(base, error)
            raise UnavailableError(f"{base} got no answer\n{error}") from error

    async def stream(
        self,
        path: str,
        *,
        item: Any,
        query: Any = None,
        body: Any = None,
        silence_s: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        assert body is None
        url = self.url_of(path, query)
        link = await self._connect(path, url.query)
        try:
            while True:
                try:
                    async with self.attend(url.base), asyncio.timeout(silence_s or self._silence_s):
                        event = await link.receive()
                except TimeoutError as error:
                    if isinstance(error, StokerError):
                        raise
                    raise UnavailableError(f"{url} was silent") from None
                if event is None:
                    return
                if isinstance(event, StokerError):
                    if isinstance(event, NotReadyError):
                        await self._moves(url.base, event)
                    raise event
                if not isinstance(event, KeepAlive):
                    yield event
        finally:
            link.close()

    async def ws(self, path: str, *, timeout_s: float | None = None, **_: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s if timeout_s is None else timeout_s):
                link = await self._connect(path, EMPTY)
                link.is_socket = True
                return link
        except TimeoutError as error:
            if isinstance(error, StokerError):
                raise
            raise DeadlineExceededError(f"a WebSocket to {self.url} passed its deadline") from None


class SimClientPool:
    """Clients by URL (:class:`stoker_wire.http.client.pool.ClientPool`)."""

    def __init__(self, network: Network, process: Process, peer: str) -> None:
        self._network, self._process, self._peer = network, process, peer
        self._clients: dict[str, SimClient] = {}

    def client(self, url: str) -> SimClient:
        client = self._clients.get(url)
        if client is None:
            client = SimClient(self._network, self._process, url, self._peer)
            self._clients[url] = client
        return client

    def pop(self, url: str) -> SimClient | None:
        return self._clients.pop(url, None)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
