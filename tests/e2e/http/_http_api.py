"""What tests of the HTTP API share: the routes as they are declared, raw requests, a schema check."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock
from urllib.parse import quote, urlencode, urlsplit

from stoker_gcs.api.routes import ROUTES as GCS_ROUTES
from stoker_gcs.dashboard.routes import ROUTES as DASHBOARD_ROUTES
from stoker_nodelet.api import ROUTES as NODELET_ROUTES
from stoker_nodelet.profiles.api import ROUTES as PROFILE_ROUTES
from stoker_nodelet.transfer import ROUTES as TRANSFER_ROUTES
from stoker_scheduler.api import ROUTES as SCHEDULER_ROUTES
from stoker_wire.http.server.service import Service
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.server.request import BoundRoute

TIMEOUT_S = 40.0


def declared() -> dict[str, Service]:
    """The three services with all their routes and nothing behind them."""
    made = {name: Service(name, Settings(), token="t") for name in ("gcs", "scheduler", "nodelet")}
    tables = {
        "gcs": (GCS_ROUTES, DASHBOARD_ROUTES),
        "scheduler": (SCHEDULER_ROUTES,),
        "nodelet": (NODELET_ROUTES, PROFILE_ROUTES, TRANSFER_ROUTES),
    }
    for name, service in made.items():
        for table in tables[name]:
            service.add_routes(table, MagicMock())
    return made


SERVICES = declared()
ROUTES = [(name, route) for name, service in SERVICES.items() for route in service.routes]


def label(route: tuple[str, BoundRoute]) -> str:
    """How pytest shows a route."""
    return f"{route[0]} {route[1].method} {route[1].path}"


@dataclass(frozen=True)
class Answer:
    """A reply as it came."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.raw)


@dataclass(frozen=True)
class Api:
    """One service that runs. Every answer is checked for what none may hold."""

    url: str
    token: str

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        **query: Any,
    ) -> Answer:
        with self.open(method, path, body, headers=headers, token=token, **query) as reply:
            raw = reply.read()
        answer = Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, raw)
        assert b"Traceback" not in raw, raw
        if answer.status >= 400 and method != "HEAD":
            assert answer.headers["content-type"] == "application/problem+json", raw
            problem = answer.json
            assert problem["status"] == answer.status
            assert problem["code"]
            assert problem["detail"]
            assert problem["request_id"] == answer.headers["x-request-id"]
        return answer

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        **query: Any,
    ) -> http.client.HTTPResponse:
        """The reply before its body is read, for streams. A ``token`` of "" sends none."""
        sent = {"Host": urlsplit(self.url).netloc, "Content-Type": "application/json"}
        sent["Accept"] = "application/problem+json, */*"
        if token != "":
            sent["Authorization"] = f"Bearer {self.token if token is None else token}"
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        target = path + (f"?{urlencode(query)}" if query else "")
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=TIMEOUT_S)
        connection.request(method, target, raw, {**sent, **(headers or {}), "Connection": "close"})
        return connection.getresponse()

    def items(self, path: str, limit: int = 1000, **query: Any) -> list[Any]:
        """All items of a list, page by page."""
        found: list[Any] = []
        cursor = ""
        while True:
            page = self("GET", path, limit=limit, cursor=cursor, **query).json
            assert len(page["items"]) <= limit
            found += page["items"]
            cursor = page["next_cursor"]
            if not cursor:
                return found


def filled(path: str, values: Mapping[str, str], default: str = "x") -> str:
    """A route's path with its parts replaced."""
    parts = []
    for part in path.split("/"):
        name = part.strip("{}").partition(":")[0]
        parts.append(quote(values.get(name, default), safe="") if part.startswith("{") else part)
    return "/".join(parts)


def is_page(route: BoundRoute) -> bool:
    """Whether a route gives pages of a list."""
    return route.method == "GET" and "Page" in getattr(route.reply, "__name__", str(route.reply))


# A JSON Schema check for what msgspec writes: not the whole standard.

_TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip


def faults(value: Any, schema: Any, document: Any, at: str = "$") -> Iterator[str]:
    """Say where ``value`` departs from ``schema``."""
    schema = resolve(schema, document)
    if "anyOf" in schema:
        ways = [list(faults(value, way, document, at)) for way in schema["anyOf"]]
        if all(ways):
            yield f"{at}: none of anyOf: {ways}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    kind = schema.get("type")
    if kind is None:
        return
    right = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not right:
        yield f"{at}: {value!r} is no {kind}"
        return
    if kind in ("integer", "number") and not (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    ):
        yield f"{at}: {value!r} is out of range"
    if kind == "array" and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            yield from faults(item, schema["items"], document, f"{at}[{index}]")
    if kind == "object":
        members = schema.get("properties", {})
        more = schema.get("additionalProperties", True)
        yield from (f"{at}: no {name}" for name in schema.get("required", ()) if name not in value)
        for name, member in value.items():
            if name in members:
                yield from faults(member, members[name], document, f"{at}.{name}")
            elif more is False or (members and more is True):
                yield f"{at}.{name} is not declared"
            elif isinstance(more, dict):
                yield from faults(member, more, document, f"{at}.{name}")


def resolve(schema: Any, document: Any) -> Any:
    """Follow ``$ref``; KeyError if it leads nowhere."""
    while "$ref" in schema:
        found = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        schema = found
    return schema


def references(node: Any) -> Iterator[Any]:
    """All ``$ref`` in a document."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node
        for member in node.values():
            yield from references(member)
    elif isinstance(node, list):
        for member in node:
            yield from references(member)
