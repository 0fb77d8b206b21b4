"""The document names every route and everything that it refers to, in words that generators know."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from scripts.operations import documents
from stoker_wire.messages.cluster import LeaseReply, LeaseRequest, Node
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Event, ListQuery, Page
from stoker_wire.messages.events import EventQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


def handler(name: str) -> Any:
    """Return a handler of that name."""

    async def nothing(req: Request) -> Empty:
        return Empty()

    nothing.__name__ = name
    return nothing


async def follow_data(req: Request, ws: Any) -> None:
    return None


def _refs(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for member in value.values() for ref in _refs(member)]
    if isinstance(value, list):
        return [ref for member in value for ref in _refs(member)]
    return []


def _resolve(document: dict[str, Any], ref: str) -> object:
    found: Any = document
    for part in ref.removeprefix("#/").split("/"):
        found = found[part]
    return found


async def test_the_document_is_complete(cluster: Cluster) -> None:
    service = cluster.service()
    route = service.route
    route(
        "POST",
        "/v1/leases",
        handler("submit_leases"),
        body=LeaseRequest,
        reply=LeaseReply,
        summary="Lease.",
    )
    route(
        "GET",
        "/v1/nodes",
        handler("list_nodes"),
        query=ListQuery,
        reply=Page[Node],
        summary="Nodes.",
    )
    route("GET", "/v1/nodes/{id}", handler("get_node"), reply=Node, summary="A node.")
    route("DELETE", "/v1/nodes/{id}", handler("forget_node"), summary="Forget a node.")
    route("GET", "/v1/kv/{space}/{key:.*}", handler("get_key"), summary="A value.")
    route(
        "PUT",
        "/v1/packages/{hash}",
        handler("put_package"),
        raw_body=True,
        summary="Store a package.",
    )
    route(
        "GET",
        "/v1/events",
        handler("list_events"),
        query=EventQuery,
        reply=Event,
        stream=True,
        summary="Watch.",
    )
    service.websocket("/v1/data/{id}", follow_data, summary="Data.")
    client = cluster.client(await cluster.start(service))
    async with client.session.get(f"{service.url}/openapi.json") as reply:
        document = await reply.json()

    assert document["openapi"] == "3.1.0"
    about = document["info"]
    assert (about["title"], about["version"]) == ("Stoker gcs", service.version)
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert {(r.method, r.path.replace(":.*", "")) for r in service.routes} == set(operations)
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)
    for ref in _refs(document):
        assert _resolve(document, ref), ref
    for (_, path), operation in operations.items():
        assert operation["summary"]
        refused = {status for status in operation["responses"] if status >= "4"}
        assert {"400", "401", "403", "415", "429", "503"} <= refused
        assert not {"500", "default"} & refused, "a bug is not documented"
        assert all(
            operation["responses"][status] == {"$ref": "#/components/responses/Problem"}
            for status in refused
        )
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert named == {part.strip("{}") for part in path.split("/") if part.startswith("{")}

    lease = operations["POST", "/v1/leases"]
    body = lease["requestBody"]["content"]
    assert set(body) == {"application/json"}, "msgpack is told once: generators know no such body"
    schema = _resolve(document, body["application/json"]["schema"]["$ref"])
    assert isinstance(schema, dict)
    assert schema["required"] == ["request_id", "owner_id", "demand"]
    assert schema["additionalProperties"] is False
    assert "Idempotency-Key" in {p["name"] for p in lease["parameters"]}

    listing = operations["GET", "/v1/nodes"]
    query = {p["name"]: p for p in listing["parameters"] if p["in"] == "query"}
    assert set(query) == {"limit", "cursor", "sort", "order", "count"}
    assert query["limit"]["schema"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
        "default": 100,
    }
    assert query["cursor"]["schema"]["pattern"], "no text of a URL holds a NUL character"
    package = operations["PUT", "/v1/packages/{hash}"]
    assert package["parameters"][0]["schema"]["minLength"] == 1
    assert "413" in package["responses"] and "413" not in listing["responses"]
    assert "101" in operations["GET", "/v1/data/{id}"]["responses"]
    events = operations["GET", "/v1/events"]["responses"]["200"]["content"]
    assert set(events) == {"application/x-ndjson", "text/event-stream"}


SERVICES = documents()


@pytest.fixture(params=SERVICES)
def operations(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """The operations of a service, as it has them."""
    return {
        (method.upper(), path): operation
        for path, ways in SERVICES[request.param]["paths"].items()
        for method, operation in ways.items()
    }


def test_every_operation_has_a_name_for_a_function_a_tag_and_a_summary(
    operations: dict[tuple[str, str], dict[str, Any]],
) -> None:
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names), "name the handlers apart"
    assert [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []
    for operation in operations.values():
        assert operation["summary"]
        assert len(operation["tags"]) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_the_document_describes_the_tags_in_use(service: str) -> None:
    document = SERVICES[service]
    used = {one["tags"][0] for ways in document["paths"].values() for one in ways.values()}
    assert {tag["name"] for tag in document["tags"]} == used
    assert all(tag["description"] for tag in document["tags"])
    assert document["servers"] == [
        {"url": "/", "description": document["servers"][0]["description"]}
    ]
    assert document["info"]["license"]["identifier"] == "Apache-2.0"


def test_an_operation_that_no_person_may_call_is_internal() -> None:
    marked = {
        (name, operation["operationId"]): operation.get("x-internal", False)
        for name, document in SERVICES.items()
        for ways in document["paths"].values()
        for operation in ways.values()
    }
    for name in ("submit_job", "list_jobs", "get_job", "stop_job", "get_job_logs", "taint_node"):
        assert marked["gcs", name] is False
    for name in ("register_node", "record_heartbeat", "report_tasks", "acquire_leadership"):
        assert marked["gcs", name] is True
    assert marked["scheduler", "request_leases"] and marked["nodelet", "start_lease"]


def test_bytes_and_lines_are_as_generators_know_them() -> None:
    paths = SERVICES["gcs"]["paths"]
    binary = {"type": "string", "format": "binary"}
    key = paths["/v1/kv/{namespace}/{key}"]
    assert key["put"]["requestBody"]["content"] == {"application/octet-stream": {"schema": binary}}
    got = key["get"]["responses"]["200"]["content"]
    assert got == {"application/octet-stream": {"schema": binary}}
    logs = paths["/v1/jobs/{job_id}/logs"]["get"]["responses"]["200"]["content"]
    line = {"$ref": "#/components/schemas/LogLine"}
    assert logs == {
        "application/x-ndjson": {"schema": line},
        "text/plain": {"schema": {"type": "string"}},
    }
    assert list(paths["/v1/jobs"]["get"]["responses"]["200"]["content"]) == [
        "application/json",
        "application/msgpack",
        "application/x-ndjson",
        "text/event-stream",
    ]


def test_a_reply_has_its_own_status() -> None:
    calls = SERVICES["gateway"]["paths"]
    replies = {s for s in calls["/v1/calls"]["post"]["responses"] if s < "3"}
    assert replies == {"200", "202"}
    assert {s for s in calls["/v1/refs"]["post"]["responses"] if s < "3"} == {"201"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_default_fits_its_schema_for_clients_send_it(service: str) -> None:
    document = SERVICES[service]
    wrong = []
    for place, schema in _schemas_with_default(document):
        whole = json.loads(json.dumps({**schema, "components": document["components"]}))
        if not jsonschema_rs.Draft202012Validator(whole).is_valid(whole["default"]):
            wrong.append((place, schema["default"]))
    assert wrong == []


def _schemas_with_default(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if "default" in value and not place.endswith("/properties"):
            yield place, value
        for name, member in value.items():
            yield from _schemas_with_default(member, f"{place}/{name}")
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _schemas_with_default(member, place)
