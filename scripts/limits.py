"""Makes ``docs/limits.md``: every bound on what comes in, from the types, the route tables and the settings.

``tests/unit/test_docs.py`` fails when the page is not current.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec.inspect as types
from aiohttp.web_protocol import RequestHandler

from stoker.gateway.calls.routes import ROUTES as CALLS
from stoker_gcs.api.routes import ROUTES as GCS
from stoker_gcs.registry.nodes.rules import MAX_AMOUNT
from stoker_gcs.registry.queues.registry import MAX_QUEUES
from stoker_gcs.registry.schedules.registry import MAX_SCHEDULES
from stoker_nodelet.api import ROUTES as NODELET
from stoker_nodelet.environments import environments
from stoker_scheduler.api import MAX_PLANNED_SIZE
from stoker_scheduler.api import ROUTES as SCHEDULER
from stoker_wire.constraints.node_filters import MAX_DEPTH
from stoker_wire.data.frame_socket import MAX_FRAME_NBYTES
from stoker_wire.data.frames import MAX_BUFFERS
from stoker_wire.data.piece_lists import MAX_PIECES
from stoker_wire.data.spool import MAX_FRAME_BYTES
from stoker_wire.http.codec import EXPLAINED_NBYTES
from stoker_wire.http.server.connections import RESERVE
from stoker_wire.http.server.dispatch import MAX_REQUEST_ID, MAX_TIMEOUT_S
from stoker_wire.http.server.idempotency import MAX_KEY_CHARACTERS
from stoker_wire.http.server.rates import BURST_S
from stoker_wire.http.server.routes import Route, WebSocketRoute
from stoker_wire.messages.cluster import MAX_GPUS
from stoker_wire.messages.common import MAX_INT64
from stoker_wire.process.files.open_files import MOST
from stoker_wire.settings import Settings

LIMITS = Path(__file__).parents[1] / "docs/limits.md"
SERVICES: dict[str, tuple[Route | WebSocketRoute, ...]] = {
    "gcs": GCS,
    "scheduler": SCHEDULER,
    "nodelet": NODELET,
    "gateway": CALLS,
}
_HEAD = """\
# Limits

<!-- Made by `make docs` from the types, the route tables and the settings: change them there. -->

All that comes in has a bound, which is checked before the memory for it is taken. What passes one is
refused with a problem document; *error* is its status and code. A *setting* is the variable that changes
a bound.
"""
_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Field:
    """A member of what a route takes, by the type that has it; ``part`` is an element or a key of it."""

    owner: str
    name: str
    part: str
    kind: types.Type


def fields_of(routes: Iterable[Route | WebSocketRoute]) -> Iterator[Field]:
    """Yield each member, at any depth, of the bodies and queries of ``routes``, once."""
    seen: set[type] = set()
    for route in routes:
        for taken in (getattr(route, "body", None), route.query):
            if taken is not None:
                yield from _fields(types.type_info(taken), Field("", "", "", types.AnyType()), seen)


def _fields(kind: types.Type, at: Field, seen: set[type]) -> Iterator[Field]:
    if isinstance(kind, types.Metadata):
        yield from _fields(kind.type, at, seen)
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _fields(one, at, seen)
    elif isinstance(kind, types.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for member in kind.fields:
                at = Field(_origin(kind.cls, member.name), member.encode_name, "", kind)
                yield from _fields(member.type, at, seen)
    else:
        if at.owner:
            yield Field(at.owner, at.name, at.part, kind)
        for part, below in _parts(kind):
            yield from _fields(below, Field(at.owner, at.name, part, kind), seen)


def _origin(cls: type, name: str) -> str:
    """Return the class that a member is inherited from."""
    return next(
        base.__name__ for base in reversed(cls.__mro__) if name in inspect.get_annotations(base)
    )


def _parts(kind: types.Type) -> list[tuple[str, types.Type]]:
    match kind:
        case types.DictType():
            return [("key", kind.key_type), ("value", kind.value_type)]
        case types.ListType() | types.VarTupleType() | types.SetType() | types.FrozenSetType():
            return [("each", kind.item_type)]
        case types.TupleType():
            return [("each", one) for one in kind.item_types]
    return []


def is_bounded_integer(kind: types.IntType) -> bool:
    """Return whether all that it takes fits into 64 bits."""
    lowest = kind.ge if kind.ge is not None else kind.gt
    highest = kind.le if kind.le is not None else kind.lt
    return (
        lowest is not None
        and lowest >= -MAX_INT64 - 1
        and highest is not None
        and highest <= MAX_INT64
    )


def limits_page() -> str:
    """Return ``docs/limits.md``."""
    parts = [
        _HEAD,
        _section("Connections and requests", _of_requests()),
        _section("Bodies of routes that take more or less than the rest", _of_bodies()),
        _section("WebSockets", _of_sockets()),
        _section("The data path", _of_data()),
        _section("Stored things", _of_things()),
        _of_types(),
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Limit:
    """One row: a bound, its unit, the setting that changes it, and the error beyond it."""

    what: str
    most: str
    setting: str = ""
    error: str = "400 `bad_request`"


def _section(title: str, limits: list[Limit]) -> str:
    rows = "\n".join(f"| {one.what} | {one.most} | {one.setting} | {one.error} |" for one in limits)
    return f"## {title}\n\n| what | at most | setting | error |\n|---|---|---|---|\n{rows}\n"


def _setting(name: str) -> str:
    return f"`STOKER_{name.upper()}`"


def _of_requests() -> list[Limit]:
    http = {
        name: one.default
        for name, one in inspect.signature(RequestHandler.__init__).parameters.items()
    }
    closed, reset = "the oldest is closed", "closed"
    rate = "429 `rate_limited`, with `Retry-After`"
    return [
        Limit(
            "connections of a service that have not shown a token yet (and an eighth of the files that it "
            "may have open)",
            f"{_DEFAULTS.unproven_connections}",
            _setting("unproven_connections"),
            closed,
        ),
        Limit(
            "time that they have for it",
            _seconds(_DEFAULTS.unproven_s),
            _setting("unproven_s"),
            reset,
        ),
        Limit("the same of a driver and a worker, each", "256, 10 s", "", closed),
        Limit(
            "files that a service may have open (raised at its start from the soft limit to the hard one)",
            _number(MOST),
            "`ulimit -Hn`",
            f"new connections are closed; the last {RESERVE} descriptors are the service's own",
        ),
        Limit("request line, and so URL and query", _size(http["max_line_size"])),
        Limit("header", _size(http["max_field_size"])),
        Limit("headers", _number(http["max_headers"])),
        Limit(
            "body, where its route says nothing else",
            _size(_DEFAULTS.max_body_bytes),
            _setting("max_body_bytes"),
            "413 `payload_too_large`",
        ),
        Limit("compressed body", "none", "", "415 `unsupported_encoding`"),
        Limit("body that does not fit, whose bad member is named exactly", _size(EXPLAINED_NBYTES)),
        Limit("`Idempotency-Key`", f"1 to {MAX_KEY_CHARACTERS} characters"),
        Limit("`X-Request-Id`", f"{MAX_REQUEST_ID} characters", "", "replaced by another"),
        Limit("`Stoker-Timeout-S`", _seconds(MAX_TIMEOUT_S)),
        Limit(
            "time to answer, unless the request says another",
            _seconds(_DEFAULTS.request_timeout_s),
            _setting("request_timeout_s"),
            "504 `deadline_exceeded`",
        ),
        Limit(
            f"calls by one token that is not the cluster's (those of {_seconds(BURST_S)} at once) of "
            f"{_expensive()}",
            f"{_DEFAULTS.expensive_per_s:g} per second",
            _setting("expensive_per_s"),
            rate,
        ),
        Limit(
            f"requests with a wrong token from one address (those of {_seconds(BURST_S)} at once)",
            f"{_DEFAULTS.failures_per_s:g} per second",
            _setting("failures_per_s"),
            rate,
        ),
    ]


def _expensive() -> str:
    routes = {
        f"`{route.method} {_plain(route.path)}`"
        for table in SERVICES.values()
        for route in table
        if isinstance(route, Route) and route.cost == "expensive"
    }
    return ", ".join(sorted(routes))


def _of_bodies() -> list[Limit]:
    return [
        Limit(
            f"`{route.method} {_plain(route.path)}` of the {service}",
            _size(route.max_body_bytes),
            "",
            "413 `payload_too_large`",
        )
        for service, table in SERVICES.items()
        for route in table
        if isinstance(route, Route) and route.max_body_bytes is not None
    ]


def _of_sockets() -> list[Limit]:
    return [
        Limit(
            f"message of `{_plain(route.path)}` of the {service}",
            _size(route.max_msg_bytes),
            "",
            "closed with 1009",
        )
        for service, table in SERVICES.items()
        for route in table
        if isinstance(route, WebSocketRoute)
    ]


def _of_data() -> list[Limit]:
    closed = "the channel is closed"
    return [
        Limit("frame between runtimes", _size(MAX_FRAME_NBYTES), "", closed),
        Limit("buffers of a frame", _number(MAX_BUFFERS), "", closed),
        Limit("frame of the task history", _size(MAX_FRAME_BYTES)),
    ]


def _of_things() -> list[Limit]:
    package, full = "422 `runtime_env_failed`", "413 `payload_too_large`"
    return [
        Limit(
            "package, unpacked",
            _size(_DEFAULTS.package_max_bytes),
            _setting("package_max_bytes"),
            package,
        ),
        Limit("files of a package", _number(environments._MAX_MEMBERS), "", package),
        Limit("pieces of a package", _number(MAX_PIECES), "", "400 `bad_request`"),
        *(
            Limit(what, shown(getattr(_DEFAULTS, name)), _setting(name), error)
            for what, name, shown, error in (
                ("value of a key", "kv_value_max_bytes", _size, full),
                ("values of a namespace", "kv_namespace_max_bytes", _size, full),
                ("keys of a namespace", "kv_namespace_max_keys", _number, full),
                ("all packages, and all functions", "blobs_max_bytes", _size, full),
                ("packages, and functions", "blobs_max_count", _number, full),
                ("detached objects", "detached_max_count", _number, full),
            )
        ),
        Limit(
            "detached objects, all copies",
            _size(_DEFAULTS.detached_max_bytes),
            _setting("detached_max_bytes"),
            "413 `payload_too_large`",
        ),
        Limit("amount of a resource", f"{MAX_AMOUNT:g}"),
        Limit("GPUs of a node", _number(MAX_GPUS)),
        Limit("queues", _number(MAX_QUEUES)),
        Limit("schedules", _number(MAX_SCHEDULES)),
        Limit("depth of a node filter", _number(MAX_DEPTH)),
        Limit(
            "nodes, leases and requests of a state that is planned on",
            _number(MAX_PLANNED_SIZE),
            "",
            "503 `unavailable`",
        ),
    ]


def _of_types() -> str:
    rows = []
    every = fields_of(route for table in SERVICES.values() for route in table)
    for field in sorted(every, key=lambda one: (one.owner, one.name, one.part)):
        bound = _bound(field.kind)
        if bound:
            part = {"": "", "key": ", each key", "value": ", each value", "each": ", each"}[
                field.part
            ]
            rows.append(f"| `{field.owner}.{field.name}`{part} | {bound} |")
    return (
        "## Members of requests\n\n"
        "By the type of a body (as in `/openapi.json`) or a query, or the one that it has the member from\n"
        "(all lists have those of `ListQuery`). Beyond, the error is 400 `bad_request`.\n"
        "Any other integer has 64 bits; any other text or list is as long as its request may be.\n\n"
        "| member | takes |\n|---|---|\n" + "\n".join(dict.fromkeys(rows)) + "\n"
    )


def _bound(kind: types.Type) -> str:
    match kind:
        case types.IntType() | types.FloatType():
            return _range(kind)
        case types.StrType():
            return _length(kind, "characters")
        case types.BytesType():
            return _length(kind, "bytes")
        case types.DictType() | types.ListType() | types.VarTupleType() | types.SetType():
            return _length(kind, "entries")
    return ""


def _range(kind: types.IntType | types.FloatType) -> str:
    words = []
    if kind.gt is not None:
        words.append(f"more than {_number(kind.gt)}")
    if kind.ge is not None and kind.ge > -MAX_INT64:
        words.append(f"at least {_number(kind.ge)}")
    if kind.lt is not None:
        words.append(f"less than {_number(kind.lt)}")
    if kind.le is not None and kind.le < MAX_INT64:
        words.append(f"at most {_number(kind.le)}")
    return ", ".join(words)


def _length(kind: Any, unit: str) -> str:
    least, most = kind.min_length, kind.max_length
    if most is None:
        return "not empty" if least == 1 else f"at least {least} {unit}" if least else ""
    return f"{least} to {_number(most)} {unit}" if least else f"at most {_number(most)} {unit}"


def _plain(path: str) -> str:
    return path.replace(":.+}", "}")


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{_number(nbytes)} bytes"


def _seconds(time_s: float) -> str:
    return f"{_number(time_s)} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


if __name__ == "__main__":
    LIMITS.write_text(limits_page())
