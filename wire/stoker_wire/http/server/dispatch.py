"""The way of one request through the protocol: its check, deadline, idempotency and errors.

Called by the HTTP server for every request, as its one middleware. Nothing leaves but a reply or a
problem document, and a handler runs at most once per Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from aiohttp import ClientConnectionResetError, web

from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    ForbiddenError,
    InternalError,
    NotFoundError,
    NotReadyError,
    PayloadTooLargeError,
    RateLimitedError,
    StokerError,
    UnauthorizedError,
    UnavailableError,
)
from stoker_wire.http.client.exchange import REPLICAS_HEADER
from stoker_wire.http.codec import (
    BYTES,
    JSON,
    MSGPACK,
    PROBLEM,
    TEXT,
    encode_json,
    encode_msgpack,
    without_env_vars,
)
from stoker_wire.http.gateway.calls import is_call
from stoker_wire.http.principals import (
    ANONYMOUS,
    AUTHOR,
    JOBS,
    SERVICES,
    Principal,
    author_of,
)
from stoker_wire.http.problems import problem_response
from stoker_wire.http.server.faults import Dispatch, parse_faults, with_faults
from stoker_wire.http.server.idempotency import (
    MAX_KEY_CHARACTERS,
    IdempotencyStore,
    StoredReply,
    fingerprint,
)
from stoker_wire.http.server.request import BoundRoute, Reply, Request
from stoker_wire.http.server.request_guard import check_role
from stoker_wire.http.server.routes import is_api
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.common import Role
from stoker_wire.process.log import REQUEST_ID
from stoker_wire.suggestions import suggestion
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT, check_protocol, is_newer

if TYPE_CHECKING:
    from stoker_wire.http.server.connections import Connections
    from stoker_wire.http.server.rates import Rates
    from stoker_wire.http.server.request_guard import RequestGuard
    from stoker_wire.process.metrics import Metrics
    from stoker_wire.process.pauses import Pauses
    from stoker_wire.settings import Settings

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_REQUEST_ID = 128
MAX_TIMEOUT_S = 86_400.0

_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_REFUSALS = (ForbiddenError, UnauthorizedError, RateLimitedError)
_GIVEN_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_REQUEST_ID}}}")
_NO_ROUTE = "(none)"


class Refused(NamedTuple):
    """A request that was refused: the error, its method and route, whose it was and from where."""

    error: StokerError
    where: str
    principal: Principal
    address: str


class Dispatcher:
    """Router of requests to handlers. ``live`` are those being answered, ``idle`` is set if none is."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        guard: RequestGuard,
        connections: Connections,
        rates: Rates,
        idempotency: IdempotencyStore,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        self.name = name
        self.settings = settings
        self.guard = guard
        self.connections = connections
        self.rates = rates
        self.idempotency = idempotency
        self.metrics = metrics
        self.log = log
        self.routes: dict[object, BoundRoute] = {}
        self.is_ready = False
        self.stopping = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.live: dict[int, Request] = {}
        self.pauses: Pauses | None = None
        self.on_refused: Callable[[Refused], object] | None = None
        """Called with each request of a person or a job that was refused, and of who has no valid token."""
        self._running = 0
        self._next_id = IdSource(Prefix.REQUEST)
        self._log_requests = log.isEnabledFor(logging.DEBUG)
        self._answer_route: Dispatch = self._dispatch
        if settings.faults:
            rules, seed = parse_faults(settings.faults), f"{settings.faults_seed} {name}"
            self._answer_route = with_faults(rules, seed, self._dispatch)
            log.warning("requests fail on purpose", extra={"STOKER_FAULTS": settings.faults})
        metrics.show("stoker_http_requests_in_progress", lambda: self._running)

    def end_requests_of(self, token_id: str) -> None:
        """Cut off what is being answered to the bearers of a token, as it is revoked."""
        for request in list(self.live.values()):
            if request.principal.token_id == token_id and request.task is not None:
                request.task.cancel("its token was revoked")

    def end_refused_watches(self) -> None:
        """Cut off the streams of reads that were begun with a token of a secret that has been given up.

        Other requests end by themselves, at their deadlines.
        """
        for request in list(self.live.values()):
            streams = request.route.stream or request.response is not None
            reads = request.route.method == "GET"
            good = not (streams and reads) or self.guard.verifies(request.http.headers)
            if not good and request.task is not None:
                request.task.cancel("the secret of its token was given up")

    async def answer(self, http: web.Request, handler: Endpoint) -> web.StreamResponse:
        """Answer one request; whatever goes wrong becomes a problem document."""
        started = time.perf_counter()
        given_id = http.headers.get("X-Request-Id")
        valid = given_id is not None and _GIVEN_ID.fullmatch(given_id)
        request_id = given_id if valid and given_id else self._next_id()
        REQUEST_ID.set(request_id)
        route = self.routes.get(http.match_info.handler)
        self._running += 1
        self.idle.clear()
        request: Request | None = None
        principal = ANONYMOUS
        response: web.StreamResponse
        status = 499
        try:
            public = route is not None and route.public
            principal = await self.guard.check(http.headers, http.path, http.method, public=public)
            if principal is not ANONYMOUS:
                self.connections.proved(http.protocol)
            if route is not None and principal is not ANONYMOUS:
                check_role(principal, route.roles, f"{route.method} {route.path}")
            AUTHOR.set(author_of(principal, http.remote) if http.method in _CHANGES else None)
            if route is None:
                response = await handler(http)
            else:
                request = self._request(http, route, request_id, principal)
                if principal is not ANONYMOUS:
                    await self.guard.admit(principal, route, request.path)
                self.live[id(http)] = request
                if route.expensive:
                    self.rates.spend(principal)
                response = await self._answer_route(request)
            status = response.status
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if _has_left(http, error):
                response = web.Response(status=status)
            else:
                error = self.rates.judge(error, http.remote)
                if self.on_refused is not None and isinstance(error, _REFUSALS):
                    self._note_refused(self.on_refused, error, http, principal)
                response = self._failed(error, http, request, request_id)
                status = response.status
        finally:
            self.live.pop(id(http), None)
            self._running -= 1
            if not self._running:
                self.idle.set()
            seconds = time.perf_counter() - started
            where = route.path if route else _NO_ROUTE
            self.metrics.answered(http.method, where, status, seconds)
            if self._log_requests:
                fields = {
                    "method": http.method,
                    "path": http.path,
                    "status": status,
                    "seconds": round(seconds, 6),
                    "peer": http.headers.get("Stoker-Peer", ""),
                }
                self.log.debug("request", extra=fields)
        response.headers["X-Request-Id"] = request_id
        return response

    def _note_refused(
        self,
        note: Callable[[Refused], object],
        error: StokerError,
        http: web.Request,
        principal: Principal,
    ) -> None:
        """Tell of a refusal whose it is: also of a token that was good once."""
        if principal is ANONYMOUS:
            with contextlib.suppress(UnauthorizedError):
                principal = self.guard.verify(http.headers.get("Authorization", ""))
                if not principal.roles.isdisjoint(JOBS):
                    return  # of a job that has ended: its last processes go on for a moment
        elif isinstance(error, RateLimitedError) or not principal.roles.isdisjoint(SERVICES):
            return  # it came too often, or a service has made a mistake, which its log has
        route = self.routes.get(http.match_info.handler)
        where = f"{http.method} {route.path if route is not None else _NO_ROUTE}"
        note(Refused(error, where, principal, http.remote or ""))

    def _request(
        self, http: web.Request, route: BoundRoute, request_id: str, principal: Principal
    ) -> Request:
        peer = http.headers.get("Stoker-Peer", "the caller")
        if "\0" in http.path or "%00" in http.query_string:
            # No id or name holds one, and not every database can compare it.
            raise BadRequestError("the URL holds a NUL character")
        if is_api(http.path):
            check_protocol(http.headers.get(PROTOCOL_HEADER), peer=peer, service=self.name)
            if self.stopping.is_set():
                raise UnavailableError(f"{self.name} is stopping")
            if not self.is_ready and not route.before_ready:
                raise NotReadyError(f"{self.name} has not finished starting")
            if REPLICAS_HEADER in http.headers and self._was_stopped():
                # Its caller has asked another replica meanwhile.
                raise NotReadyError(f"{self.name} was stopped for a while, and asks to try again")
        request = Request(
            http,
            route,
            request_id=request_id,
            principal=principal,
            peer=peer,
            settings=self.settings,
            timeout_s=self._timeout_s(http.headers.get("Stoker-Timeout-S")),
            now_s=asyncio.get_running_loop().time(),
            stopping=self.stopping,
            log=self.log,
        )
        request.task = asyncio.current_task()
        return request

    def _was_stopped(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self.pauses is not None and self.pauses.came_in_one(now_s)

    def _timeout_s(self, header: str | None) -> float:
        if header is None:
            return self.settings.request_timeout_s
        try:
            timeout_s = float(header)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise BadRequestError(
                f"Stoker-Timeout-S: expected seconds from 0 to {MAX_TIMEOUT_S:.0f}, got {header[:40]!r}",
                field="Stoker-Timeout-S",
            )
        return timeout_s

    async def _dispatch(self, request: Request) -> web.StreamResponse:
        route = request.route
        if route.stream:
            return await self._call(request)
        request.deadline = deadline = asyncio.timeout_at(request.deadline_at_s)
        try:
            async with deadline:
                key = request.http.headers.get("Idempotency-Key")
                if key is None:
                    return await self._call(request)
                if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
                    raise BadRequestError(
                        f"Idempotency-Key: expected 1 to {MAX_KEY_CHARACTERS} characters, got {len(key)}",
                        field="Idempotency-Key",
                    )
                request.idempotency_key = key
                if not route.idempotency:
                    return await self._call(request)
                return await self._once(request, key)
        except TimeoutError as error:
            if isinstance(error, StokerError) or not deadline.expired():
                raise
            waiting = request.waits_for or f"{self.name} to finish it"
            raise DeadlineExceededError(
                f"{route.method} {request.http.path} passed its deadline of "
                f"{request.timeout_s:g} s while it waited for {waiting}",
                explain=request.explain,
            ) from None

    async def _once(self, request: Request, key: str) -> web.StreamResponse:
        """Run the handler once per Idempotency-Key; replay its reply after that."""
        body_hash = fingerprint(await request.read())
        scope = f"{request.principal} {request.http.rel_url.raw_path_qs} {key}"
        stored = await self.idempotency.claim(scope, body_hash)
        if stored is not None:
            return web.Response(
                body=stored.body,
                status=stored.status,
                headers={"Content-Type": stored.content_type, "Idempotency-Replayed": "true"},
            )
        finished = False
        try:
            response = await self._call(request)
            if isinstance(response, web.Response) and 200 <= response.status < 300:
                body = response.body if isinstance(response.body, bytes) else b""
                content_type = response.headers.get("Content-Type", BYTES)
                reply = StoredReply(response.status, content_type, body)
                finished = True
                await asyncio.shield(self.idempotency.finish(scope, body_hash, reply))
            return response
        finally:
            if not finished:
                await asyncio.shield(self.idempotency.abandon(scope))

    async def _call(self, request: Request) -> web.StreamResponse:
        """Decode the request, call the handler, encode its reply."""
        route, http = request.route, request.http
        newer = is_newer(http.headers.get(PROTOCOL_HEADER))
        asked = http.query_string or route.query
        request.query = route.decode_query(http.query, newer=newer) if asked else None
        if route.codec is not None:
            raw = await request.read()
            request.body = route.codec.decode(
                raw, http.headers.get("Content-Type", JSON), newer=newer
            )
        value = await route.handler(request)
        if isinstance(value, web.StreamResponse):
            return value
        reply = value if isinstance(value, Reply) else Reply(value)
        if request.principal.role is Role.VIEWER and not isinstance(reply.value, bytes):
            reply = msgspec.structs.replace(reply, value=without_env_vars(reply.value))
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
            fields = {"method": http.method, "path": http.path}
            self.log.error("crashed", exc_info=error, extra=fields)
            error = InternalError(
                f"this is a bug in {self.name}\nits log has the trace under request id {request_id}"
            )
        if request is not None and request.response is not None:
            # The status is sent already: all that is left is to break the connection, so that the
            # reader cannot take a cut reply for a whole one.
            if http.transport is not None:
                http.transport.abort()
            return request.response
        status, headers["Content-Type"], body = problem_response(
            error, request_id=request_id, status=status
        )
        route = self.routes.get(http.match_info.handler)
        plain = route is not None and route.plain_errors
        if plain and PROBLEM not in http.headers.get("Accept", ""):
            headers["Content-Type"], body = f"{TEXT}; charset=utf-8", str(error).encode()
        if status == 503:
            headers["Retry-After"] = "1"
        elif isinstance(error, RateLimitedError):
            headers["Retry-After"] = str(math.ceil(error.extra.get("retry_after_s", 1)))
        elif status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(body=body, status=status, headers=headers)

    def _of_aiohttp(self, error: web.HTTPException, http: web.Request) -> StokerError:
        if error.status == 404:
            known = {route.path for route in self.routes.values()}
            theirs = http.headers.get(PROTOCOL_HEADER)
            if is_newer(theirs):
                return NotFoundError(
                    f"{self.name} has no route {http.path}\n"
                    f"the caller speaks protocol {theirs}, {self.name} {PROTOCOL_TEXT}: "
                    f"upgrade {self.name}"
                )
            fix = suggestion(http.path, known)
            if is_call(http.path):
                fix = "a gateway has it: stoker start --head --gateway-port 7601, and use that port"
            return NotFoundError(f"{self.name} has no route {http.path}\n{fix}")
        if error.status == 405:
            allowed = error.headers.get("Allow", "")
            return BadRequestError(f"{http.path} takes {allowed}, not {http.method}")
        if error.status == 413:
            return PayloadTooLargeError(error.text or error.reason)
        if error.status < 500:
            return BadRequestError(error.text or error.reason)
        return UnavailableError(error.text or error.reason)

    async def sign(self, http: web.Request, response: web.StreamResponse) -> None:
        """Record that the reply begins, and add the protocol's headers."""
        request = self.live.get(id(http))
        if request is not None:
            request.response = response
            response.headers["X-Request-Id"] = request.request_id
        response.headers[PROTOCOL_HEADER] = PROTOCOL_TEXT


def _has_left(http: web.Request, error: Exception) -> bool:
    """Return whether the peer is gone: there is nobody to answer, and no fault of this service."""
    if isinstance(error, StokerError):  # of a peer behind this service
        return False
    lost = http.transport is None or http.transport.is_closing()
    return lost and isinstance(error, (ConnectionError, ClientConnectionResetError))


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
