"""The HTTP server base: a Service is a set of typed routes with the protocol's rules around them.

Every service (gcs, scheduler, nodelet, and the data path of each worker) makes one Service, adds
its routes, and starts it. The rules live here once: who may come in, ids, deadlines, idempotency,
errors as problem documents, readiness, metrics, and the OpenAPI document. It must know nothing of
what any service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from stoker_wire import log
from stoker_wire.admission import Admission, outward_address
from stoker_wire.codec import BYTES, JSON, MSGPACK, PROBLEM, encode_json, encode_msgpack
from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    NotReadyError,
    OpenBindError,
    PayloadTooLargeError,
    PortInUseError,
    StartError,
    StokerError,
    UnavailableError,
)
from stoker_wire.idempotency import IdempotencyStore, MemoryStore, StoredReply, fingerprint
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.control import ListQuery, Page
from stoker_wire.metrics import Metrics
from stoker_wire.nearest import suggestion
from stoker_wire.problems import problem_of
from stoker_wire.request import Handler, Reply, Request, Route, SocketHandler
from stoker_wire.running import run_service
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT, VERSION, check_protocol
from stoker_wire.watch import stream_response, watch_response

if TYPE_CHECKING:
    from stoker_wire.auth import Authenticator
    from stoker_wire.settings import Settings

__all__ = (
    "ListQuery",
    "Page",
    "Reply",
    "Request",
    "Service",
    "run_service",
    "stream_response",
    "watch_response",
)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]
_NO_ROUTE = "(none)"


class Service:
    """Typed routes behind one or two listening sockets.

    Make it, add routes with :meth:`route` and :meth:`websocket`, ``await start(...)``, call
    :meth:`ready` when the service may be used, and ``await stop()`` at the end. ``metrics`` takes
    the component's own counters, ``log`` is bound to the service's name.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        token: str,
        version: str = VERSION,
        authenticator: Authenticator | None = None,
        idempotency: IdempotencyStore | None = None,
    ) -> None:
        if not token:
            raise OpenBindError(f"{name} has no token; set STOKER_TOKEN or STOKER_TOKEN_FILE")
        self.name = name
        self.settings = settings
        self.version = version
        self.host = ""
        self.port = 0
        self.unix_path: str | None = None
        self.metrics = Metrics()
        self.log = log.get_logger(name)
        self.stopping = asyncio.Event()
        self.routes: list[Route] = []
        self.idempotency = idempotency or MemoryStore()
        self.admission = Admission(settings, token, authenticator)
        self._ready = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._by_handler: dict[object, Route] = {}
        self._live: dict[int, Request] = {}
        self._next_id = IdSource(Prefix.REQUEST)
        self._openapi: bytes | None = None

        @web.middleware
        async def answer(request: web.Request, handler: _Endpoint) -> web.StreamResponse:
            return await self._answer(request, handler)

        self._app = web.Application(middlewares=[answer])
        self._app.on_response_prepare.append(self._sign)
        self._runner: web.AppRunner | None = None
        self._add_own_routes()

    # Routes

    def route(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        body: Any = None,
        reply: Any = None,
        query: Any = None,
        summary: str,
        raw_body: bool = False,
        stream: bool = False,
        max_body_bytes: int | None = None,
        idempotency: bool = True,
        before_ready: bool = False,
    ) -> None:
        """Register ``handler`` and its entry in the OpenAPI document.

        ``body``, ``reply`` and ``query`` are message types (``reply`` of one line for a
        ``stream``). With ``raw_body`` the handler awaits ``req.read()`` itself. A ``stream`` has no
        deadline. ``idempotency=False`` leaves Idempotency-Key to the handler. ``before_ready``
        answers even while the service is not ready.
        """
        self._add(
            Route(
                method,
                path,
                handler,
                summary=summary,
                body=body,
                reply=reply,
                query=query,
                raw_body=raw_body,
                stream=stream,
                max_body_bytes=max_body_bytes or self.settings.max_body_bytes,
                idempotency=idempotency,
                before_ready=before_ready,
            )
        )

    def websocket(
        self,
        path: str,
        handler: SocketHandler,
        *,
        summary: str,
        query: Any = None,
        max_msg_bytes: int = 0,
        heartbeat_s: float | None = 15.0,
        before_ready: bool = False,
    ) -> None:
        """Register a WebSocket route: ``handler(req, ws)`` runs until the connection ends.

        ``max_msg_bytes`` 0 means no limit. The socket is closed when the service stops.
        """

        async def accept(req: Request) -> web.StreamResponse:
            ws = web.WebSocketResponse(
                max_msg_size=max_msg_bytes, heartbeat=heartbeat_s, compress=False
            )
            await ws.prepare(req.http)
            await handler(req, ws)
            if not ws.closed:
                await ws.close()
            return ws

        self._add(
            Route(
                "GET",
                path,
                accept,
                summary=summary,
                query=query,
                stream=True,
                before_ready=before_ready,
                socket=handler,
            )
        )

    def _add(self, route: Route) -> None:
        async def endpoint(_: web.Request) -> web.StreamResponse:
            raise InternalError("reached only through the service's own dispatch")

        self.routes.append(route)
        self._by_handler[endpoint] = route
        self._openapi = None
        self._app.router.add_route(route.method, route.path, endpoint)

    # Life

    @property
    def url(self) -> str:
        """Where others reach this service."""
        host = self.settings.advertise_host or self.host
        if host in ("0.0.0.0", "::", ""):
            host = outward_address()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`ready` was called and the service does not stop."""
        return self._ready and not self.stopping.is_set()

    def ready(self, is_ready: bool = True) -> None:
        """Open (or close) the ``/v1`` routes and ``/readyz``."""
        self._ready = is_ready

    async def start(
        self, host: str | None, port: int = 0, unix_path: str | os.PathLike[str] | None = None
    ) -> None:
        """Listen on ``host``:``port`` (0: a free one), on ``unix_path``, or on both.

        PortInUseError and OpenBindError say how to mend it.
        """
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=75.0
        )
        self.admission.listens_on(host)
        await self._runner.setup()
        try:
            if unix_path is not None:
                self.unix_path = os.fspath(unix_path)
                await self._listen_unix(self._runner, self.unix_path)
            if host is not None:
                self.host = host
                await self._listen_tcp(self._runner, host, port)
        except BaseException:
            await self._runner.cleanup()
            raise
        self.log.info("listening", url=self.url if host else None, unix=self.unix_path)

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop accepting, let requests finish for ``grace_s``, close watches and sockets."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        self.stopping.set()
        for site in list(runner.sites):
            await site.stop()
        for request in list(self._live.values()):
            if isinstance(request.response, web.WebSocketResponse):
                await request.response.close(code=1001, message=b"the service stops")
        grace_s = self.settings.stop_grace_s if grace_s is None else grace_s
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for request in list(self._live.values()):
                self.log.warning("cut off", route=request.route.path, waits=request.waits_for)
                if request.task is not None:
                    request.task.cancel("the service stops")
        await runner.cleanup()
        if self.unix_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.unix_path)
        self.log.info("stopped")

    async def _listen_tcp(self, runner: web.AppRunner, host: str, port: int) -> None:
        site = web.TCPSite(runner, host, port, backlog=1024, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"{self.name} cannot listen on {host}:{port}: another program does; "
                    "stop it, choose another port with --port or STOKER_PORT, or use port 0"
                ) from None
            raise StartError(f"{self.name} cannot listen on {host}:{port}: {error}") from None
        self.port = site.port

    async def _listen_unix(self, runner: web.AppRunner, path: str) -> None:
        if len(os.fsencode(path)) > 107:
            raise StartError(
                f"the socket path {path} is longer than 107 bytes; set STOKER_SESSION_ROOT shorter"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        try:
            await web.UnixSite(runner, path, backlog=1024).start()
            os.chmod(path, 0o600)
        except OSError as error:
            raise StartError(f"{self.name} cannot listen on {path}: {error}") from None

    # One request

    async def _answer(self, http: web.Request, handler: _Endpoint) -> web.StreamResponse:
        """Answer one request; whatever goes wrong becomes a problem document."""
        started = time.perf_counter()
        given_id = http.headers.get("X-Request-Id")
        valid = given_id is not None and _REQUEST_ID.fullmatch(given_id)
        request_id = given_id if valid and given_id else self._next_id()
        route = self._by_handler.get(http.match_info.handler)
        self._idle.clear()
        self.metrics.in_flight.inc()
        request: Request | None = None
        response: web.StreamResponse
        status = 499
        try:
            principal = await self.admission.check(http.headers, http.path)
            if route is None:
                response = await handler(http)
            else:
                request = self._request(http, route, request_id, principal)
                self._live[id(http)] = request
                response = await self._dispatch(request)
            status = response.status
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response = self._failed(error, http, request, request_id)
            status = response.status
        finally:
            self._live.pop(id(http), None)
            if not self._live:
                self._idle.set()
            seconds = time.perf_counter() - started
            where = route.path if route else _NO_ROUTE
            self.metrics.in_flight.dec()
            self.metrics.answered(http.method, where, status, seconds)
            self.log.debug(
                "request",
                method=http.method,
                path=http.path,
                status=status,
                seconds=round(seconds, 6),
                request_id=request_id,
                peer=http.headers.get("Stoker-Peer", ""),
            )
        response.headers["X-Request-Id"] = request_id
        return response

    def _request(self, http: web.Request, route: Route, request_id: str, principal: str) -> Request:
        peer = http.headers.get("Stoker-Peer", "the caller")
        v1 = http.path.startswith("/v1")
        if v1:
            check_protocol(http.headers.get(PROTOCOL_HEADER), peer=peer, service=self.name)
            if self.stopping.is_set():
                raise UnavailableError(f"{self.name} is stopping")
            if not self._ready and not route.before_ready:
                raise NotReadyError(f"{self.name} has not finished starting")
        request = Request(
            http,
            route,
            request_id=request_id,
            principal=principal,
            peer=peer,
            timeout_s=self._timeout_s(http.headers.get("Stoker-Timeout-S")),
            now_s=asyncio.get_running_loop().time(),
            stopping=self.stopping,
            log=self.log,
        )
        request.task = asyncio.current_task()
        return request

    def _timeout_s(self, header: str | None) -> float:
        if header is None:
            return self.settings.request_timeout_s
        try:
            timeout_s = float(header)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s <= 86_400:
            raise BadRequestError(
                f"Stoker-Timeout-S: expected seconds from 0 to 86400, got {header[:40]!r}",
                field="Stoker-Timeout-S",
            )
        return timeout_s

    async def _dispatch(self, request: Request) -> web.StreamResponse:
        route = request.route
        if route.stream:
            return await self._call(request)
        deadline = asyncio.timeout_at(request.deadline_at_s)
        try:
            async with deadline:
                key = request.http.headers.get("Idempotency-Key")
                if key is None:
                    return await self._call(request)
                request.idempotency_key = key
                if not route.idempotency:
                    return await self._call(request)
                return await self._once(request, key)
        except TimeoutError:
            if not deadline.expired():
                raise
            waits = request.waits_for or f"{self.name} to finish it"
            raise DeadlineExceededError(
                f"{route.method} {request.http.path} passed its deadline of "
                f"{request.timeout_s:g} s while it waited for {waits}",
                explain=request.explain,
            ) from None

    async def _once(self, request: Request, key: str) -> web.StreamResponse:
        """Run the handler once per Idempotency-Key, and replay its reply after that."""
        print_ = fingerprint(await request.read())
        scope = f"{request.principal} {request.http.rel_url.raw_path_qs} {key}"
        kept = await self.idempotency.claim(scope, print_)
        if kept is not None:
            return web.Response(
                body=kept.body,
                status=kept.status,
                headers={"Content-Type": kept.content_type, "Idempotency-Replayed": "true"},
            )
        finished = False
        try:
            response = await self._call(request)
            if isinstance(response, web.Response) and 200 <= response.status < 300:
                body = response.body if isinstance(response.body, bytes) else b""
                content_type = response.headers.get("Content-Type", BYTES)
                reply = StoredReply(response.status, content_type, body)
                finished = True
                await asyncio.shield(self.idempotency.finish(scope, print_, reply))
            return response
        finally:
            if not finished:
                await asyncio.shield(self.idempotency.abandon(scope))

    async def _call(self, request: Request) -> web.StreamResponse:
        """Decode, call the handler, encode."""
        route, http = request.route, request.http
        request.query = route.decode_query(http.query) if http.query_string or route.query else None
        if route.codec is not None:
            raw = await request.read()
            request.body = route.codec.decode(raw, http.headers.get("Content-Type", JSON))
        value = await route.handler(request)
        if isinstance(value, web.StreamResponse):
            return value
        reply = value if isinstance(value, Reply) else Reply(value)
        return _encode(reply, http.headers.get("Accept", ""))

    def _failed(
        self, error: Exception, http: web.Request, request: Request | None, request_id: str
    ) -> web.StreamResponse:
        status: int | None = None
        headers: dict[str, str] = {}
        if isinstance(error, web.HTTPException):
            status = error.status
            headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            error = self._of_aiohttp(error, http)
        elif not isinstance(error, StokerError):
            self.log.error(
                "crashed", method=http.method, path=http.path, request_id=request_id, exc_info=error
            )
            error = InternalError(
                f"a bug in {self.name}; its log has the trace under request id {request_id}"
            )
        if request is not None and request.response is not None:
            # The status is sent already: all that is left is to break the connection, so that the
            # reader cannot take a cut reply for a whole one.
            if http.transport is not None:
                http.transport.abort()
            return request.response
        problem = problem_of(error, request_id=request_id, status=status)
        headers["Content-Type"] = PROBLEM
        if problem.status == 503:
            headers["Retry-After"] = "1"
        elif problem.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(body=encode_json(problem), status=problem.status, headers=headers)

    def _of_aiohttp(self, error: web.HTTPException, http: web.Request) -> StokerError:
        if error.status == 404:
            known = {route.path for route in self.routes}
            return NotFoundError(
                f"{self.name} has no route {http.path}{suggestion(http.path, known)}"
            )
        if error.status == 405:
            allowed = error.headers.get("Allow", "")
            return BadRequestError(f"{http.path} takes {allowed}, not {http.method}")
        if error.status == 413:
            return PayloadTooLargeError(error.text or error.reason)
        if error.status < 500:
            return BadRequestError(error.text or error.reason)
        return UnavailableError(error.text or error.reason)

    async def _sign(self, http: web.Request, response: web.StreamResponse) -> None:
        """Note that the reply begins, and put our protocol on it."""
        request = self._live.get(id(http))
        if request is not None:
            request.response = response
            response.headers["X-Request-Id"] = request.request_id
        response.headers[PROTOCOL_HEADER] = PROTOCOL_TEXT

    # Routes of every service

    def _add_own_routes(self) -> None:
        self.route("GET", "/healthz", self._healthz, reply=Health, summary="Whether it is alive")
        self.route("GET", "/readyz", self._readyz, reply=Health, summary="Whether it may be used")
        self.route("GET", "/metrics", self._metrics, summary="Metrics, for Prometheus")
        self.route("GET", "/openapi.json", self._document, summary="This API as OpenAPI 3.1")

    async def _healthz(self, _: Request) -> Health:
        return Health(service=self.name, version=self.version, status="ok")

    async def _readyz(self, _: Request) -> Health:
        if not self.is_ready:
            raise NotReadyError(f"{self.name} has not finished starting, or is stopping")
        return Health(service=self.name, version=self.version, status="ready")

    async def _metrics(self, _: Request) -> web.Response:
        return web.Response(
            body=self.metrics.render(), headers={"Content-Type": self.metrics.content_type}
        )

    async def _document(self, _: Request) -> web.Response:
        if self._openapi is None:
            from stoker_wire.openapi import document

            self._openapi = encode_json(document(self.name, self.version, self.routes))
        return web.Response(body=self._openapi, headers={"Content-Type": JSON})


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/healthz`` and ``/readyz`` say."""

    service: str
    version: str
    status: str


def _encode(reply: Reply, accept: str) -> web.Response:
    value = reply.value
    if value is None:
        status = 204 if reply.status == 200 else reply.status
        return web.Response(status=status, headers=reply.headers)
    if isinstance(value, (bytes, memoryview)):
        body, content_type = bytes(value), BYTES
    elif MSGPACK in accept:
        body, content_type = encode_msgpack(value), MSGPACK
    else:
        body, content_type = encode_json(value), JSON
    return web.Response(
        body=body, status=reply.status, headers={"Content-Type": content_type, **reply.headers}
    )
