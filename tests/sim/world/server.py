"""An HTTP server in a world: the product's routes, readiness, deadlines, idempotency and errors."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from typing import TYPE_CHECKING, Any

from stoker_wire.errors import DeadlineExceededError, NotFoundError, NotReadyError, StokerError
from stoker_wire.http.client.endpoints import READY_PATH
from stoker_wire.http.client.exchange import REPLICAS_HEADER
from stoker_wire.http.codec import MSGPACK, Codec, encode_msgpack
from stoker_wire.http.principals import ADMINS, ROOT
from stoker_wire.http.problems import problem_response
from stoker_wire.http.server.idempotency import MemoryStore, StoredReply, fingerprint
from stoker_wire.http.server.request import BoundRoute, Reply, Request
from stoker_wire.http.server.routes import WebSocketRoute
from tests.sim.world.wire import EMPTY, KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker_wire.process.pauses import Pauses
    from tests.sim.world.links import Link
    from tests.sim.world.loop import Process
    from tests.sim.world.network import Network
    from tests.sim.world.wire import Wire

_log = logging.getLogger("sim")


class _Http:
    """What handlers see of aiohttp's request."""

    __slots__ = ("headers", "link", "match_info", "path")

    def __init__(self, path: str, headers: Mapping[str, str], match: Mapping[str, str]) -> None:
        self.path, self.headers, self.match_info = path, headers, match
        self.link: Link | None = None

    @property
    def transport(self) -> Any:
        return None if self.link is None or self.link.closed else _NO_SOCKET

    @property
    def can_read_body(self) -> bool:
        return False


class _NoSocket:
    """A transport, and its socket, which needs no keep-alive of the kernel."""

    family = socket.AF_UNIX

    def get_extra_info(self, _: str) -> _NoSocket:
        return self


_NO_SOCKET = _NoSocket()


class EventStream:
    """The answer of a watch: its source of events."""

    def __init__(self, source: Any) -> None:
        self.source = source


async def watch_response(req: Request, source: Any, **_: Any) -> EventStream:
    """Answer with the events of ``source`` (in place of the one that writes to a socket)."""
    req.lift_deadline()
    return EventStream(source)


@functools.cache
def _codec(body: Any) -> Codec[Any]:
    return Codec(body)


class Server:
    """The HTTP server of one process: routes, readiness, deadlines and idempotency."""

    def __init__(self, network: Network, process: Process, url: str) -> None:
        self._network, self.process, self.url = network, process, url
        self._routes: dict[tuple[str, int], list[tuple[list[str], Any, BoundRoute]]] = {}
        self._exact: dict[tuple[str, str], tuple[list[str], Any, BoundRoute]] = {}
        self._replies = MemoryStore()
        self.is_ready = False
        self.pauses: Pauses | None = None
        self.stopping = asyncio.Event()
        network.servers[url] = self

    def add_routes(self, routes: Any, owner: Any) -> None:
        """Serve the routes of a table."""
        for route in routes:
            method = "GET" if isinstance(route, WebSocketRoute) else route.method
            parts = route.path.split("/")
            bound = _bound(route, owner)
            if "{" not in route.path:
                self._exact[method, route.path] = (parts, route, bound)
            self._routes.setdefault((method, len(parts)), []).append((parts, route, bound))

    def _find(self, method: str, path: str) -> tuple[Any, BoundRoute, Mapping[str, str]]:
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact[1], exact[2], EMPTY
        parts = path.split("/")
        for pattern, route, bound in self._routes.get((method, len(parts)), ()):
            match = {}
            for want, have in zip(pattern, parts, strict=True):
                if want[:1] == "{":
                    match[want[1:-1]] = have
                elif want != have:
                    break
            else:
                return route, bound, match
        raise NotFoundError(f"no route {method} {path}")

    def request(self, wire: Wire) -> tuple[Any, Request]:
        """Return a request as the handler gets it."""
        route, bound, match = self._find(wire.method, wire.path)
        if not self.is_ready and not route.before_ready:
            raise NotReadyError(f"{self.url} has not finished starting")
        now_s = asyncio.get_running_loop().time()
        if (
            self.pauses is not None
            and REPLICAS_HEADER in wire.headers
            and self.pauses.came_in_one(now_s)
        ):
            raise NotReadyError(f"{self.url} was stopped for a while, and asks to try again")
        timeout_s = float(wire.headers.get("Stoker-Timeout-S", 30.0))
        request = Request(
            _Http(wire.path, wire.headers, match),  # type: ignore[arg-type]
            bound,
            request_id="r_sim",
            principal=ROOT,
            peer=wire.peer,
            settings=self._network.settings,
            timeout_s=timeout_s,
            now_s=now_s,
            stopping=self.stopping,
            log=_log,
        )
        if bound.codec is not None:
            request.body = bound.codec.decode(wire.data or b"", MSGPACK)
        if bound.query is not None:
            request.query = bound.decode_query(wire.query)  # type: ignore[arg-type]
        request.idempotency_key = wire.headers.get("Idempotency-Key")
        return route, request

    async def answer(self, wire: Wire, done: Callable[[int, bytes], None]) -> None:
        """Answer one request."""
        try:
            if wire.path == READY_PATH:
                if not self.is_ready:
                    raise NotReadyError(f"{self.url} has not finished starting")
                done(200, b"")
                return
            _, request = self.request(wire)
            request.deadline = deadline = asyncio.timeout_at(request.deadline_at_s)
            try:
                async with deadline:
                    done(200, await self._once(request, wire))
            except TimeoutError as error:
                if isinstance(error, StokerError) or not deadline.expired():
                    raise
                raise DeadlineExceededError(f"{wire.path} passed its deadline") from None
        except StokerError as error:
            status, _, body = problem_response(error)
            done(status, body)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._network.crashed(self, wire, error)

    async def _once(self, request: Request, wire: Wire) -> bytes:
        key = request.idempotency_key
        if key is None or not request.route.idempotency:
            return _encoded(await request.route.handler(request))
        scope, hashed = f"{wire.path} {key}", fingerprint(wire.data or b"")
        stored = await self._replies.claim(scope, hashed)
        if stored is not None:
            return stored.body
        finished = False
        try:
            body = _encoded(await request.route.handler(request))
            finished = True
            await self._replies.finish(scope, hashed, StoredReply(200, MSGPACK, body))
            return body
        finally:
            if not finished:
                await self._replies.abandon(scope)

    async def serve_link(self, wire: Wire, link: Link) -> None:
        """Answer a request by a stream of events or messages."""
        try:
            route, request = self.request(wire)
            request.http.link = link  # type: ignore[attr-defined]
            if isinstance(route, WebSocketRoute):
                await request.route.handler(request, link)  # type: ignore[call-arg]
                return
            stream = await request.route.handler(request)
            assert isinstance(stream, EventStream)
            source = stream.source
            beats = self.process.spawn(self._keep_alive(link))
            try:
                async for event in source:
                    if link.closed:
                        break
                    self._network.count(self.url, "event", event.kind)
                    link.send(event)
                    await link.drain()
            finally:
                beats.cancel()
                await source.aclose()
        except StokerError as error:
            link.send(error)
        except Exception as error:
            self._network.crashed(self, wire, error)
        finally:
            link.close()

    async def _keep_alive(self, link: Link) -> None:
        while not link.closed:
            await asyncio.sleep(self._network.settings.bookmark_s)
            link.send(KEEP_ALIVE)


def _bound(route: Any, owner: Any) -> BoundRoute:
    handler = functools.partial(route.handler, owner)
    if isinstance(route, WebSocketRoute):
        return BoundRoute("GET", route.path, handler, summary="", roles=ADMINS)
    bound = BoundRoute(
        route.method, route.path, handler, summary="", roles=ADMINS, idempotency=route.idempotency
    )
    bound.codec = None if route.body is None else _codec(route.body)
    if route.query is not None:
        bound.query, bound.query_names = route.query, _query_names(route.query)
    return bound


@functools.cache
def _query_names(query: Any) -> tuple[str, ...]:
    return BoundRoute("GET", "/", _no_handler, summary="", roles=ADMINS, query=query).query_names


async def _no_handler(_: Request) -> None:
    """Nothing: only the type of a query is looked at."""


def _encoded(value: object) -> bytes:
    value = value.value if isinstance(value, Reply) else value
    if value is None:
        return b""
    return bytes(value) if isinstance(value, (bytes, memoryview)) else encode_msgpack(value)
