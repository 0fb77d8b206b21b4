"""The OpenAPI 3.1 document of a service, from the same types that decode its requests.

Called by the HTTP server at the first ``GET /openapi.json``, so that the document cannot differ from
the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_wire.http.codec import BYTES, EVENT_STREAM, JSON, MSGPACK, NDJSON, PROBLEM, TEXT
from stoker_wire.http.principals import PEOPLE
from stoker_wire.http.problems import Problem
from stoker_wire.http.server.idempotency import MAX_KEY_CHARACTERS
from stoker_wire.http.server.openapi.examples import BODIES, PARAMETERS
from stoker_wire.http.server.openapi.tags import TAGS, tag_of
from stoker_wire.http.server.request import MAY_BE_EMPTY
from stoker_wire.http.server.routes import is_api
from stoker_wire.messages.control import Event

if TYPE_CHECKING:
    from stoker_wire.http.server.request import BoundRoute

_REF = "#/components/schemas/{name}"
_NO_NUL = {"type": "string", "minLength": 1, "pattern": r"^[^\x00]*$"}
"""A text in a URL: nothing there is empty or holds a NUL character."""
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_PROBLEM = {"$ref": "#/components/responses/Problem"}
_PART = re.compile(r"\{([^}:]+)(?::([^}]*))?\}")
_ABOUT = (
    "An integer is written without a fraction: 1.0 is none. A body of JSON may as well be msgpack "
    f"(`{MSGPACK}`); so is a reply to who accepts that. Operations with `x-internal` are of the cluster's "
    "own processes, and change with them."
)
_RAW = {TEXT: {"type": "string"}, JSON: {"type": "object"}}
_BINARY = {"type": "string", "format": "binary"}
"""Bytes as they are, in the words that generators of clients know."""


def document(title: str, version: str, routes: Iterable[BoundRoute]) -> dict[str, Any]:
    """Return the document of ``routes``; every type appears once under ``components``."""
    routes = list(routes)
    types = [
        type_
        for route in routes
        for type_ in (route.body, route.reply, route.query, *route.replies.values())
        if type_ is not None
    ]
    unique = list({repr(type_): type_ for type_ in [Problem, Event, *types]}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    _state_base64(schemas, components)
    schema_of = dict(zip(map(repr, unique), schemas, strict=True))
    paths: dict[str, dict[str, dict[str, Any]]] = {}
    for route in routes:
        entry = paths.setdefault(_PART.sub(r"{\1}", route.path), {})
        entry[route.method.lower()] = _operation(route, schema_of, components)
    for query in {repr(route.query) for route in routes if route.query is not None}:
        # Its members are parameters by now: of a type that nothing has, clients would make a class.
        components.pop(_name_of(schema_of[query]), None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Stoker {title}",
            "version": version,
            "description": _ABOUT,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The one that this document is from."}],
        "tags": _tags(paths),
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "The cluster's secret, or a token of one of the roles that an "
                    "operation names.",
                }
            },
            "responses": {
                "Problem": {
                    "description": "What went wrong (RFC 9457); `code` is stable.",
                    "content": {PROBLEM: {"schema": schema_of[repr(Problem)]}},
                }
            },
        },
    }


def _tags(paths: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, str]]:
    used = {tag for ways in paths.values() for one in ways.values() for tag in one["tags"]}
    return [{"name": tag.name, "description": tag.description} for tag in TAGS if tag.name in used]


def _state_base64(*schemas: Any) -> None:
    """Give all bytes in schemas a pattern: ``contentEncoding`` alone is a remark to validators."""
    for schema in schemas:
        if isinstance(schema, dict):
            if schema.get("contentEncoding") == "base64":
                schema["pattern"] = _BASE64
            _state_base64(*schema.values())
        elif isinstance(schema, (list, tuple)):
            _state_base64(*schema)


def _operation(
    route: BoundRoute, schema_of: dict[str, Any], components: dict[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [tag_of(route.path)],
        "summary": route.summary,
        "operationId": operation_id(route),
        "parameters": _parameters(route, schema_of, components),
        "responses": {
            **_success(route, schema_of),
            **{str(status): _refusal(route) for status in _refusals(route)},
        },
    }
    if about := inspect.getdoc(_function(route)):
        operation["description"] = about
    if not route.roles & PEOPLE:
        operation["x-internal"] = True
    if route.body is not None:
        body = {"schema": schema_of[repr(route.body)]}
        if route.body in BODIES:
            body["example"] = BODIES[route.body]
        operation["requestBody"] = {"required": True, "content": {JSON: body}}
    elif route.raw_body:
        operation["requestBody"] = {"required": True, "content": {BYTES: {"schema": _BINARY}}}
    operation["security"] = [{"token": sorted(route.roles)}]
    if route.public or not is_api(route.path):
        operation["security"].insert(0, {})
    return operation


def _refusal(route: BoundRoute) -> dict[str, Any]:
    if route.plain_errors:
        return {
            "description": "What went wrong: a text, unless the client accepts a problem.",
            "content": {
                TEXT: {"schema": {"type": "string"}},
                PROBLEM: {"schema": {"$ref": _REF.format(name=Problem.__name__)}},
            },
        }
    return _PROBLEM


def _refusals(route: BoundRoute) -> list[int]:
    """Return the statuses of the problems that a route may answer with; 500 would be a bug."""
    statuses = {400, 401, 403, 415, 429, 503}
    if _PART.search(route.path):
        statuses.add(404)
    if is_api(route.path):
        statuses |= {404, 409, 410, 422, 507}
    if route.body is not None or route.raw_body:
        statuses.add(413)
    if route.stream:
        statuses.add(416)
    if not route.stream or is_api(route.path):
        statuses.add(504)
    return sorted(statuses)


def _function(route: BoundRoute) -> Callable[..., object]:
    """Return the handler of a route as it was written, without the owner bound to it."""
    handler = route.handler if route.socket is None else route.socket
    return handler.func if isinstance(handler, partial) else handler


def operation_id(route: BoundRoute) -> str:
    """Return the name of an operation, after which generators name functions: that of its handler."""
    return _function(route).__name__.lstrip("_")


def _success(route: BoundRoute, schema_of: dict[str, Any]) -> dict[str, Any]:
    if route.socket is not None:
        return {"101": {"description": "Switches to the WebSocket protocol."}}
    if route.method == "HEAD":
        return {"200": {"description": "It is there."}}
    replies: dict[str, Any] = {}
    for status, type_ in route.replies.items():
        replies[str(status)] = {"description": "Done."}
        if type_ is not None:
            schema = {"schema": schema_of[repr(type_)]}
            replies[str(status)]["content"] = {JSON: schema, MSGPACK: schema}
    if route.reply is not None:
        return {**replies, "200": _record(route, schema_of)}
    if replies or (route.method != "GET" and not route.stream):
        return replies or {"204": {"description": "Done."}}
    schema = _RAW.get(route.media_type, _BINARY)
    content = {"description": "Its bytes.", "content": {route.media_type: {"schema": schema}}}
    return {"200": content, "206": content} if route.stream else {"200": content}


def _record(route: BoundRoute, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of a route that has a type."""
    schema = {"schema": schema_of[repr(route.reply)]}
    if route.stream:
        lines: dict[str, Any] = {NDJSON: schema}
        if route.media_type == TEXT:
            lines[TEXT] = {"schema": _RAW[TEXT]}
        if route.reply is Event:
            lines[EVENT_STREAM] = schema
        return {"description": "One per line.", "content": lines}
    if "watch" in route.query_names:
        page = {JSON: schema, MSGPACK: schema}
        if 200 in route.replies:
            line = {"schema": schema_of[repr(route.replies[200])]}
            text = "A page; with `watch` a stream of records, one per line."
            return {"description": text, "content": {**page, NDJSON: line}}
        events = {"schema": schema_of[repr(Event)]}
        text = "A page; with `watch` a stream of events, one per line or as SSE."
        return {"description": text, "content": {**page, NDJSON: events, EVENT_STREAM: events}}
    return {"description": "Done.", "content": {JSON: schema, MSGPACK: schema}}


def _parameters(
    route: BoundRoute, schema_of: dict[str, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _part_schema(route, name),
            **_example(name),
        }
        for name, _ in _PART.findall(route.path)
    ]
    if route.query is not None:
        schema = schema_of[repr(route.query)]
        schema = components.get(_name_of(schema), schema)
        required = set(schema.get("required", ()))
        for name, member in schema.get("properties", {}).items():
            member = _of_url(member, may_be_empty=name in MAY_BE_EMPTY)
            parameters.append(
                {
                    "name": name,
                    "in": "query",
                    "required": name in required,
                    "schema": member,
                    **_example(name),
                }
            )
    if route.idempotency:
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key makes the same request happen once.",
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
            }
        )
    return parameters


def _name_of(schema: dict[str, Any]) -> str:
    """Return the name of the type that a schema refers to."""
    name: str = schema.get("$ref", "").rpartition("/")[2]
    return name


def _example(name: str) -> dict[str, str]:
    return {"example": PARAMETERS[name]} if name in PARAMETERS else {}


def _part_schema(route: BoundRoute, name: str) -> dict[str, Any]:
    pattern = route.parts.get(name)
    return _NO_NUL if pattern is None else {**_NO_NUL, "pattern": f"^{pattern}$"}


def _of_url(member: dict[str, Any], *, may_be_empty: bool) -> dict[str, Any]:
    """Return the schema of a member of a query, with the rules of all texts in URLs.

    A default that no URL can say is left out, for there are clients that send defaults.
    """
    unsaid = (None,) if may_be_empty else (None, "")
    if member.get("default") in unsaid:
        member = {name: value for name, value in member.items() if name != "default"}
    if "anyOf" in member:
        # A query has no null: what is not given has its default.
        ways = [_of_url(way, may_be_empty=may_be_empty) for way in member["anyOf"]]
        ways = [way for way in ways if way.get("type") != "null"]
        rest = {name: value for name, value in member.items() if name != "anyOf"}
        return {**rest, **ways[0]} if len(ways) == 1 else {**rest, "anyOf": ways}
    if member.get("type") != "string" or "enum" in member:
        return member
    rule = _NO_NUL if "pattern" not in member else {}
    return {
        **member,
        **rule,
        "minLength": max(member.get("minLength", 0), 0 if may_be_empty else 1),
    }
