"""The form of a route table: a service's routes as data that reads like a table.

A module of routes ends with ``ROUTES = (Route(...), ...)``. Its handlers are plain functions (or
methods named through their class) whose first argument is the *owner* of the table, the object that
:meth:`stoker_wire.http.server.service.Service.add_routes` is given with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from stoker_wire.http.codec import BYTES
from stoker_wire.messages.common import Role

Cost = Literal["cheap", "expensive"]

MAX_MSG_NBYTES = 1 << 16
"""The largest message of a WebSocket, where its route names no other limit."""


def is_api(path: str) -> bool:
    """Return whether a path is of the service's work (``/v1``, or Ray's ``/api``), not a probe."""
    return path.startswith(("/v1", "/api/"))


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP route: ``handler(owner, request)`` answers ``method`` ``path``.

    ``roles`` are those of which a caller needs one. ``body``, ``reply`` and ``query`` are message types
    (``reply`` of one line for a ``stream``), ``replies`` those of other statuses than 200 (None for
    no body), and of 200 that of a line of a watch if it is no event; ``media_type`` is that of a reply
    of bytes, or ``text/plain`` if lines may be had as text;
    ``parts`` are patterns of parts of the path, which the handler checks;
    ``summary`` is a verb and its object, for the OpenAPI document; there the operation is named like the
    handler (``submit_job``), and so are functions of clients that are made of it. With ``raw_body`` the
    handler awaits ``request.read()`` itself. A ``stream`` has no deadline. ``idempotency=False`` leaves
    Idempotency-Key to the handler. ``before_ready`` answers even while the service is not ready. Of
    ``expensive`` ones each user has a rate. ``plain_errors`` are texts, for a client that is not
    Stoker's, unless it accepts ``application/problem+json``. A ``public`` one asks for no token.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[object]]
    _: KW_ONLY
    summary: str
    roles: frozenset[Role]
    body: Any = None
    reply: Any = None
    replies: Mapping[int, Any] = field(default_factory=dict)
    query: Any = None
    raw_body: bool = False
    stream: bool = False
    media_type: str = BYTES
    parts: Mapping[str, str] = field(default_factory=dict)
    max_body_bytes: int | None = None
    idempotency: bool = True
    before_ready: bool = False
    cost: Cost = "cheap"
    plain_errors: bool = False
    public: bool = False


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """One WebSocket route: ``handler(owner, request, socket)`` runs until the connection ends.

    ``roles`` are those of which a caller needs one. A message of more than ``max_msg_bytes`` ends it, and
    so does the stop of the service.
    """

    path: str
    handler: Callable[..., Awaitable[None]]
    _: KW_ONLY
    summary: str
    roles: frozenset[Role]
    query: Any = None
    max_msg_bytes: int = MAX_MSG_NBYTES
    heartbeat_s: float | None = 15.0
    before_ready: bool = False
