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

from stoker_wire.http.codec import BYTES, EVENT_STREAM, JSON, MSGPACK, NDJSON, PROBLEM
from stoker_wire.http.problems import Problem
from stoker_wire.messages.control import Event

if TYPE_CHECKING:
    from stoker_wire.http.server.request import BoundRoute

_REF = "#/components/schemas/{name}"
_PART = re.compile(r"\{([^}:]+)(?::([^}]*))?\}")


def document(title: str, version: str, routes: Iterable[BoundRoute]) -> dict[str, Any]:
    """Return the document of ``routes``; every type appears once under ``components``."""
    routes = list(routes)
    types = [
        type_
        for route in routes
        for type_ in (route.body, route.reply, route.query)
        if type_ is not None
    ]
    unique = list({repr(type_): type_ for type_ in [Problem, Event, *types]}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    schema_of = dict(zip(map(repr, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        entry = paths.setdefault(_PART.sub(r"{\1}", route.path), {})
        entry[route.method.lower()] = _operation(route, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Stoker {title}", "version": version},
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


def _operation(
    route: BoundRoute, schema_of: dict[str, Any], components: dict[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "parameters": _parameters(route, schema_of, components),
        "responses": {
            **_success(route, schema_of),
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    about = inspect.getdoc(_function(route.handler if route.socket is None else route.socket))
    if about:
        operation["description"] = about
    if route.body is not None:
        schema = {"schema": schema_of[repr(route.body)]}
        operation["requestBody"] = {"required": True, "content": {JSON: schema, MSGPACK: schema}}
    elif route.raw_body:
        operation["requestBody"] = {"required": True, "content": {BYTES: {}}}
    operation["security"] = [{"token": sorted(route.roles)}]
    if not route.path.startswith("/v1"):
        operation["security"].insert(0, {})
    return operation


def _function(handler: Callable[..., object]) -> Callable[..., object]:
    """Return the handler of a route table as it was written, without the owner bound to it."""
    return handler.func if isinstance(handler, partial) else handler


def _success(route: BoundRoute, schema_of: dict[str, Any]) -> dict[str, Any]:
    if route.socket is not None:
        return {"101": {"description": "Switches to the WebSocket protocol."}}
    if route.reply is None:
        if route.stream:
            return {"200": {"description": "A stream.", "content": {BYTES: {}}}}
        return {"2XX": {"description": "Done."}}
    schema = {"schema": schema_of[repr(route.reply)]}
    if "watch" in route.query_names and not route.stream:
        events = {"schema": schema_of[repr(Event)]}
        return {
            "200": {
                "description": "A page; with `watch` a stream of events, one per line or as SSE.",
                "content": {JSON: schema, MSGPACK: schema, NDJSON: events, EVENT_STREAM: events},
            }
        }
    if route.stream:
        return {"200": {"description": "One per line.", "content": {NDJSON: schema}}}
    return {"200": {"description": "Done.", "content": {JSON: schema, MSGPACK: schema}}}


def _parameters(
    route: BoundRoute, schema_of: dict[str, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name, _ in _PART.findall(route.path)
    ]
    if route.query is not None:
        schema = schema_of[repr(route.query)]
        name = schema.get("$ref", "").rpartition("/")[2]
        schema = components.get(name, schema)
        required = set(schema.get("required", ()))
        for name, member in schema.get("properties", {}).items():
            parameters.append(
                {"name": name, "in": "query", "required": name in required, "schema": member}
            )
    if route.idempotency:
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key makes the same request happen once.",
                "schema": {"type": "string"},
            }
        )
    return parameters


def _operation_id(route: BoundRoute) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", "_", _PART.sub(r"\1", route.path)).strip("_")
    return f"{route.method.lower()}_{words}"
