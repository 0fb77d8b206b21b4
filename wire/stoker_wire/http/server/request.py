"""One decoded request with its deadline, as a handler gets it, and the registered route it came by.

Made by the HTTP server only. A Request lives as long as its handler runs; a BoundRoute as long as its
service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_wire.errors import BadRequestError, PayloadTooLargeError, UnsupportedEncodingError
from stoker_wire.http.codec import BYTES, Codec, explain_invalid
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    import logging

    from aiohttp import web
    from multidict import MultiMapping

    from stoker_wire.http.principals import Principal
    from stoker_wire.messages.common import Role
    from stoker_wire.settings import Settings

Handler = Callable[["Request"], Awaitable[object]]
SocketHandler = Callable[["Request", "web.WebSocketResponse"], Awaitable[None]]


class Reply(msgspec.Struct, frozen=True):
    """A reply with a status or headers of its own; most handlers return the bare value."""

    value: object = None
    status: int = 200
    headers: dict[str, str] = {}


_IDENTITY = "identity"
MAY_BE_EMPTY = frozenset({"cursor", "prefix"})
"""Members of a query that may be given empty: they filter nothing."""


class BoundRoute:
    """A registered route: the types that it takes and returns, and its handler."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        summary: str,
        roles: frozenset[Role],
        body: Any = None,
        reply: Any = None,
        replies: Mapping[int, Any] | None = None,
        query: Any = None,
        raw_body: bool = False,
        stream: bool = False,
        media_type: str = BYTES,
        parts: Mapping[str, str] | None = None,
        max_body_bytes: int = 0,
        idempotency: bool = True,
        before_ready: bool = False,
        expensive: bool = False,
        plain_errors: bool = False,
        public: bool = False,
        socket: SocketHandler | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.handler = handler
        self.summary = summary
        self.roles = roles
        self.body = body
        self.reply = reply
        self.replies = replies or {}
        self.query = query
        self.raw_body = raw_body
        self.stream = stream
        self.media_type = media_type
        self.parts = parts or {}
        self.max_body_bytes = max_body_bytes
        self.idempotency = idempotency and method == "POST"
        self.before_ready = before_ready
        self.expensive = expensive
        self.plain_errors = plain_errors
        self.public = public
        self.socket = socket
        self.codec: Codec[Any] | None = None if body is None else Codec(body)
        self.query_names = (
            () if query is None else tuple(f.encode_name for f in msgspec.structs.fields(query))
        )

    def decode_query(self, given: MultiMapping[str], *, newer: bool = False) -> Any:
        """Return a query string as the route's type; BadRequestError names an unknown or bad member.

        Of a ``newer`` sender unknown ones are ignored.
        """
        for name in given:
            if name not in self.query_names and not newer:
                raise BadRequestError(
                    f"unknown query field {name!r}\n{suggestion(name, self.query_names)}",
                    field=name,
                )
        if self.query is None:
            return None
        document: dict[str, Any] = {name: given[name] for name in given if name in self.query_names}
        for name, value in document.items():
            if not value and name not in MAY_BE_EMPTY:
                raise BadRequestError(
                    f"{name}: an empty value filters nothing\ngive one, or leave {name} out",
                    field=name,
                )
        try:
            return msgspec.convert(document, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise explain_invalid(error, document, self.query, lax=True) from None


class Request:
    """One request. ``body`` and ``query`` are decoded; ``path`` holds the parts of the URL's path.

    ``principal`` is who sent it (by token), ``peer`` what the sender calls itself. ``http`` is
    aiohttp's request, for streams and headers.
    """

    __slots__ = (
        "_raw",
        "body",
        "deadline",
        "deadline_at_s",
        "explain",
        "http",
        "idempotency_key",
        "log",
        "path",
        "peer",
        "principal",
        "query",
        "request_id",
        "response",
        "route",
        "settings",
        "stopping",
        "task",
        "timeout_s",
        "waits_for",
    )

    def __init__(
        self,
        http: web.Request,
        route: BoundRoute,
        *,
        request_id: str,
        principal: Principal,
        peer: str,
        settings: Settings,
        timeout_s: float,
        now_s: float,
        stopping: asyncio.Event,
        log: logging.Logger,
    ) -> None:
        encoding = http.headers.get("Content-Encoding", _IDENTITY)
        if encoding.lower() != _IDENTITY:
            # Nothing here inflates, so that the length that is counted is the one that is decoded.
            raise UnsupportedEncodingError(
                f"Content-Encoding: {encoding[:40]!r} is not taken\nsend the body as it is",
                field="Content-Encoding",
            )
        self.http = http
        self.route = route
        self.path: Mapping[str, str] = http.match_info
        self.request_id = request_id
        self.principal = principal
        self.peer = peer
        self.timeout_s = timeout_s
        self.deadline_at_s = now_s + timeout_s
        self.settings = settings
        self.stopping = stopping
        self.log = log
        self.idempotency_key: str | None = None
        self.body: Any = None
        self.query: Any = None
        self.waits_for = ""
        self.explain: str | None = None
        self.response: web.StreamResponse | None = None
        self.task: asyncio.Task[Any] | None = None
        self.deadline: asyncio.Timeout | None = None
        self._raw: bytes | None = None

    @property
    def deadline_s(self) -> float:
        """Seconds left to answer; never negative."""
        return max(0.0, self.deadline_at_s - asyncio.get_running_loop().time())

    def lift_deadline(self) -> None:
        """Let the handler run on without end: it answers with a watch."""
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(None)

    def waiting_for(self, what: str, *, explain: str | None = None) -> None:
        """Record what the handler waits for; the problem sent when the deadline passes repeats it."""
        self.waits_for = what
        self.explain = explain

    async def read(self) -> bytes:
        """Return the raw body; PayloadTooLargeError beyond the route's limit."""
        if self._raw is None:
            self._raw = await self._read() if self.http.can_read_body else b""
        return self._raw

    async def _read(self) -> bytes:
        limit = self.route.max_body_bytes
        length = self.http.content_length
        if length is not None and length > limit:
            raise self._too_large(limit)
        parts, nbytes = [], 0
        async for part in self.http.content.iter_any():
            nbytes += len(part)
            if nbytes > limit:
                raise self._too_large(limit)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self, limit: int) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"the body passes the limit of {limit} bytes of {self.route.method} {self.route.path}"
        )
