"""The document names every route, and everything that it refers to is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_wire.messages.cluster import LeaseReply, LeaseRequest, Node
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Event, ListQuery, Page
from stoker_wire.messages.events import EventQuery

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


async def nothing(req: Request) -> Empty:
    return Empty()


async def echo(req: Request, ws: Any) -> None:
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
    route("POST", "/v1/leases", nothing, body=LeaseRequest, reply=LeaseReply, summary="Lease.")
    route("GET", "/v1/nodes", nothing, query=ListQuery, reply=Page[Node], summary="Nodes.")
    route("GET", "/v1/nodes/{id}", nothing, reply=Node, summary="A node.")
    route("DELETE", "/v1/nodes/{id}", nothing, summary="Forget a node.")
    route("GET", "/v1/kv/{space}/{key:.*}", nothing, summary="A value.")
    route("PUT", "/v1/packages/{hash}", nothing, raw_body=True, summary="Store a package.")
    route(
        "GET", "/v1/events", nothing, query=EventQuery, reply=Event, stream=True, summary="Watch."
    )
    service.websocket("/v1/data/{id}", echo, summary="Data.")
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
    assert set(body) == {"application/json", "application/msgpack"}
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
    assert set(events) == {"application/x-ndjson"}
