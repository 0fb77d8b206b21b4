"""The HTTP server of every service: typed routes with the protocol's rules around them.

Every service (gcs, scheduler, nodelet) makes one Service, adds its routes, and starts it. (The data
path of a worker is no service: its sockets are the sdk's, :mod:`stoker.runtime.net.channels`.) The rules are
here once: authentication, ids, deadlines, idempotency, errors as problem documents, readiness,
metrics, and the OpenAPI document. Nothing here knows what a service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from stoker_wire.errors import (
    BadRequestError,
    InternalError,
    NotFoundError,
    NotReadyError,
    OpenBindError,
    PortInUseError,
    StartError,
)
from stoker_wire.http.codec import BYTES, JSON, TEXT, encode_json
from stoker_wire.http.dashboard.control_plane import PROCESS_PATH, ProcessStatus
from stoker_wire.http.principals import ADMINS, ANONYMOUS, EVERYONE, READERS, SERVICES
from stoker_wire.http.problems import ERROR_PAGES
from stoker_wire.http.server.connections import Connections
from stoker_wire.http.server.dispatch import Dispatcher, Endpoint
from stoker_wire.http.server.idempotency import IdempotencyStore, MemoryStore
from stoker_wire.http.server.rates import Rates
from stoker_wire.http.server.request import BoundRoute, Handler, Reply, Request, SocketHandler
from stoker_wire.http.server.request_guard import RequestGuard, outward_address
from stoker_wire.http.server.routes import MAX_MSG_NBYTES, Cost, Route, WebSocketRoute
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.http.server.unix_socket import private_socket
from stoker_wire.http.server.watch import bytes_response, stream_response, watch_response
from stoker_wire.messages.control import SECRET_PATH, ListQuery, Page, SecretStatus
from stoker_wire.process import log
from stoker_wire.process.background import Background
from stoker_wire.process.metrics import Metrics
from stoker_wire.process.run_service import run_service
from stoker_wire.process.setting_values import DEFAULT
from stoker_wire.tls.contexts import check_listener, server_context
from stoker_wire.tls.files import files_of
from stoker_wire.tls.listener import TlsSite
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from stoker_wire.http.server.tokens import Authority
    from stoker_wire.messages.common import Role
    from stoker_wire.settings import Settings

__all__ = (
    "ListQuery",
    "Page",
    "Reply",
    "Request",
    "Service",
    "bytes_response",
    "run_service",
    "stream_response",
    "watch_response",
)


class Service:
    """Typed routes behind one or two listening sockets.

    Make it, add routes with :meth:`route` and :meth:`websocket`, ``await start(...)``, call
    :meth:`ready` when the service may be used, and ``await stop()`` at the end. ``metrics`` takes
    the component's own counters, ``log`` is the service's logger.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        token: str | TokenSigner,
        version: str = VERSION,
        authority: Authority | None = None,
        idempotency: IdempotencyStore | None = None,
    ) -> None:
        if not token:
            raise OpenBindError(f"{name} has no token\nset STOKER_TOKEN or STOKER_TOKEN_FILE")
        self.name = name
        self.settings = settings
        self._tls = files_of(settings)
        self.version = version
        self.host = ""
        self.port = 0
        self._started_at_s = time.time()
        self.unix_path: str | None = None
        self.obstacle = ""
        """Why it cannot serve now, in words; ``/readyz`` says so. Empty if it can."""
        self.metrics = Metrics(name)
        self.log = log.service_logger(name)
        self.routes: list[BoundRoute] = []
        self.tokens = token if isinstance(token, TokenSigner) else TokenSigner(token)
        self.behind: Callable[[], tuple[str, ...]] = tuple
        """The processes, in words, that this service has yet to give a token of the secret that signs."""
        self.guard = RequestGuard(settings, self.tokens, authority)
        self.connections = Connections(settings.unproven_connections, settings.unproven_s)
        self.dispatcher = Dispatcher(
            name,
            settings,
            guard=self.guard,
            connections=self.connections,
            rates=Rates(settings),
            idempotency=idempotency or MemoryStore(),
            metrics=self.metrics,
            log=self.log,
        )
        self.stopping = self.dispatcher.stopping
        self.tokens.secret.on_change(self.dispatcher.end_refused_watches)
        self._background = Background(f"service {name}")
        self._openapi: bytes | None = None

        @web.middleware
        async def answer(request: web.Request, handler: Endpoint) -> web.StreamResponse:
            response = await self.dispatcher.answer(request, handler)
            self.connections.answered(request.protocol, response)
            return response

        self._app = web.Application(middlewares=[answer])
        self._app.on_response_prepare.append(self.dispatcher.sign)
        self._runner: web.AppRunner | None = None
        self._add_own_routes()

    # Routes

    def add_routes(self, table: Iterable[Route | WebSocketRoute], owner: object) -> None:
        """Register a table of routes; each handler's first argument is ``owner``."""
        for entry in table:
            options = {
                field.name: getattr(entry, field.name)
                for field in fields(entry)
                if field.name not in ("method", "path", "handler")
            }
            if isinstance(entry, Route):
                handler = partial(entry.handler, owner)
                self.route(entry.method, entry.path, handler, **options)
            else:
                self.websocket(entry.path, partial(entry.handler, owner), **options)

    def route(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        roles: frozenset[Role] = READERS,
        body: Any = None,
        reply: Any = None,
        replies: Mapping[int, Any] | None = None,
        query: Any = None,
        summary: str,
        raw_body: bool = False,
        stream: bool = False,
        media_type: str = BYTES,
        parts: Mapping[str, str] | None = None,
        max_body_bytes: int | None = None,
        idempotency: bool = True,
        before_ready: bool = False,
        cost: Cost = "cheap",
        plain_errors: bool = False,
        public: bool = False,
    ) -> None:
        """Register ``handler`` and its entry in the OpenAPI document.

        ``roles`` are those of which a caller needs one (a table always names them). ``body``,
        ``reply`` and ``query`` are message types (``reply`` of one line for a ``stream``), ``replies``
        those of other statuses than 200, ``media_type`` is that of a reply of bytes, or ``text/plain`` if
        lines may be had as text, ``parts`` are patterns of parts of the path. With ``raw_body`` the
        handler awaits ``req.read()`` itself. A ``stream`` has no deadline.
        ``idempotency=False`` leaves Idempotency-Key to the handler. ``before_ready`` answers even while
        the service is not ready. Of ``expensive`` ones each user has a rate. ``plain_errors`` are texts,
        for a client that is not Stoker's, unless it accepts ``application/problem+json``. A ``public``
        route asks for no token.
        """
        self._add(
            BoundRoute(
                method,
                path,
                handler,
                summary=summary,
                roles=roles,
                body=body,
                reply=reply,
                replies=replies,
                query=query,
                raw_body=raw_body,
                stream=stream,
                media_type=media_type,
                parts=parts,
                max_body_bytes=max_body_bytes or self.settings.max_body_bytes,
                idempotency=idempotency,
                before_ready=before_ready,
                expensive=cost == "expensive",
                plain_errors=plain_errors,
                public=public,
            )
        )

    def websocket(
        self,
        path: str,
        handler: SocketHandler,
        *,
        summary: str,
        roles: frozenset[Role] = READERS,
        query: Any = None,
        max_msg_bytes: int = MAX_MSG_NBYTES,
        heartbeat_s: float | None = 15.0,
        before_ready: bool = False,
    ) -> None:
        """Register a WebSocket route: ``handler(req, ws)`` runs until the connection ends.

        A message of more than ``max_msg_bytes`` ends it, and so does the stop of the service.
        """
        if max_msg_bytes <= 0:
            raise InternalError(f"{path} has no limit of messages")  # aiohttp takes 0 for none

        async def accept(req: Request) -> web.StreamResponse:
            ws = web.WebSocketResponse(
                max_msg_size=max_msg_bytes + 1, heartbeat=heartbeat_s, compress=False
            )
            try:
                await ws.prepare(req.http)
            except ValueError:  # of a key with other letters than those of base64
                raise BadRequestError(
                    "the key of the WebSocket's handshake is none", field="Sec-WebSocket-Key"
                ) from None
            await handler(req, ws)
            if not ws.closed:
                await ws.close()
            return ws

        self._add(
            BoundRoute(
                "GET",
                path,
                accept,
                summary=summary,
                roles=roles,
                query=query,
                stream=True,
                before_ready=before_ready,
                socket=handler,
            )
        )

    def _add(self, route: BoundRoute) -> None:
        async def endpoint(_: web.Request) -> web.StreamResponse:
            raise InternalError("reached only through the service's own dispatch")

        self.routes.append(route)
        self.dispatcher.routes[endpoint] = route
        self._openapi = None
        self._app.router.add_route(route.method, route.path, endpoint)

    # Life

    @property
    def url(self) -> str:
        """The URL by which others reach this service; ``http://localhost`` if only by a Unix socket."""
        if not self.port:
            return "http://localhost"
        scheme = "https" if self._tls.is_on else "http"
        host = self._reached_as()
        return (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )

    def _reached_as(self) -> str:
        host = self.settings.advertise_host or self.host
        return outward_address() if host in ("0.0.0.0", "::", "") else host

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`ready` was called and the service does not stop."""
        return self.dispatcher.is_ready and not self.stopping.is_set()

    def ready(self, is_ready: bool = True) -> None:
        """Open (or close) the ``/v1`` routes and ``/readyz``."""
        self.dispatcher.is_ready = is_ready

    async def start(
        self, host: str | None, port: int = 0, unix_path: str | os.PathLike[str] | None = None
    ) -> None:
        """Listen on ``host``:``port`` (0: a free one), on ``unix_path``, or on both.

        With STOKER_TLS the port speaks TLS, and nothing else. PortInUseError and StartError name the fix.
        """
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=75.0,
            auto_decompress=False,
        )
        self.guard.listens_on(host)
        await self._runner.setup()
        self.connections.watch(self._runner.server)
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
        self.metrics.lag.start()
        if self.tokens.secret.path is not None:
            self._background.spawn(self.tokens.secret.follow(), name="secret")
        where = {"url": self.url if host else None, "unix": self.unix_path}
        self.log.info("listening", extra=where)

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of a connection that another than this service has accepted."""
        assert self._runner is not None, "the service was started"
        assert self._runner.server is not None
        return self._runner.server()

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop listening, let requests finish for ``grace_s``, close watches and sockets."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        self.stopping.set()
        self.metrics.lag.stop()
        await self._background.close()
        for site in list(runner.sites):
            await site.stop()
        grace_s = self.settings.stop_grace_s if grace_s is None else grace_s
        try:
            async with asyncio.timeout(grace_s), asyncio.TaskGroup() as group:
                for request in self.dispatcher.live.values():
                    if isinstance(request.response, web.WebSocketResponse):
                        close = request.response.close(code=1001, message=b"the service stops")
                        group.create_task(close)
                await self.dispatcher.idle.wait()
        except TimeoutError:
            for request in list(self.dispatcher.live.values()):
                waits = {"route": request.route.path, "waits": request.waits_for}
                self.log.warning("cut off", extra=waits)
                if request.task is not None:
                    request.task.cancel("the service stops")
        await runner.cleanup()
        if self.unix_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.unix_path)
        self.log.info("stopped")

    async def _listen_tcp(self, runner: web.AppRunner, host: str, port: int) -> None:
        site: web.TCPSite | TlsSite
        if self._tls.is_on:
            context = server_context(self._tls)
            check_listener(self.name, self._reached_as(), self._tls)
            site = TlsSite(runner, context, host=host, port=port, backlog=1024)
        else:
            site = web.TCPSite(runner, host, port, backlog=1024, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            raise listen_error(self.name, host, port, error) from None
        self.port = site.port

    async def _listen_unix(self, runner: web.AppRunner, path: str) -> None:
        if len(os.fsencode(path)) > 107:
            raise StartError(
                f"the socket path {path} is longer than 107 bytes\nset STOKER_SESSION_ROOT shorter"
            )
        try:
            listener = private_socket(path)
        except OSError as error:
            raise StartError(f"{self.name} cannot listen on {path}\n{error}") from None
        await web.SockSite(runner, listener, backlog=1024).start()

    # Routes that every service has

    def _add_own_routes(self) -> None:
        for path, handler, summary, returns in (
            ("/healthz", self._check_liveness, "Check liveness", {"reply": Health}),
            ("/readyz", self._check_readiness, "Check readiness", {"reply": Health}),
            ("/metrics", self._get_metrics, "Get metrics, for Prometheus", {"media_type": TEXT}),
            (
                "/openapi.json",
                self._get_openapi,
                "Get this API as OpenAPI 3.1",
                {"media_type": JSON},
            ),
        ):
            self.route("GET", path, handler, roles=READERS, summary=summary, **returns)
        self.route(
            "GET",
            f"{ERROR_PAGES}{{code}}",
            self._get_error_page,
            roles=EVERYONE,
            public=True,  # who is refused for a token may read why
            summary="Get page of an error code, as a text of Markdown",
            media_type=TEXT,
        )
        self.route(
            "GET",
            SECRET_PATH,
            self._get_secret,
            roles=SERVICES | ADMINS,
            reply=SecretStatus,
            before_ready=True,
            summary="Get names of secrets in use, and who has yet to follow",
        )
        self.route(
            "GET",
            PROCESS_PATH,
            self._get_service,
            roles=SERVICES | ADMINS,
            reply=ProcessStatus,
            before_ready=True,
            summary="Get version, settings and lag of this process",
        )

    async def _get_service(self, _: Request) -> ProcessStatus:
        return self.status()

    def status(self) -> ProcessStatus:
        """Return what this process says of itself."""
        return ProcessStatus(
            service=self.name,
            version=self.version,
            url=self.url,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            loop_lag_s=self.metrics.lag.recent_s,
            settings=tuple(one for one in self.settings.describe() if one.source != DEFAULT),
        )

    async def _get_secret(self, _: Request) -> SecretStatus:
        secret = self.tokens.secret
        return SecretStatus(
            service=self.name,
            signs=secret.id,
            accepts=secret.ids,
            behind=self.behind(),
            fixed=secret.path is None,
        )

    async def _check_liveness(self, _: Request) -> Health:
        return Health(service=self.name, version=self.version, status="ok")

    async def _check_readiness(self, _: Request) -> Health:
        if not self.is_ready:
            raise NotReadyError(f"{self.name} has not finished starting, or is stopping")
        if self.obstacle:
            raise NotReadyError(f"{self.name} cannot serve now\n{self.obstacle}")
        return Health(service=self.name, version=self.version, status="ready")

    async def _get_metrics(self, req: Request) -> web.Response:
        of_users = req.principal.sees_all or req.principal is ANONYMOUS
        await self.metrics.measure()
        return web.Response(
            body=self.metrics.render(of_users=of_users),
            headers={"Content-Type": self.metrics.content_type},
        )

    async def _get_error_page(self, req: Request) -> web.Response:
        from stoker_wire.http.error_pages.page import PAGES, page_of

        code = req.path["code"]
        if code not in PAGES:
            raise NotFoundError(
                f"no error has the code {code}\nlook it up among those of: stoker docs",
                field="code",
            )
        return web.Response(
            body=page_of(code).encode(), headers={"Content-Type": f"{TEXT}; charset=utf-8"}
        )

    async def _get_openapi(self, _: Request) -> web.Response:
        if self._openapi is None:
            from stoker_wire.http.server.openapi.document import document

            self._openapi = encode_json(document(self.name, self.version, self.routes))
        return web.Response(body=self._openapi, headers={"Content-Type": JSON})


def listen_error(name: str, host: str, port: int, error: OSError) -> StartError:
    """Return the error of a service that cannot have its port."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"{name} cannot listen on {host}:{port}: another program does\n"
            "stop it, choose another port with --port or STOKER_PORT, or use port 0"
        )
    return StartError(f"{name} cannot listen on {host}:{port}\n{error}")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/healthz`` and ``/readyz``."""

    service: str
    version: str
    status: str
