"""What a stranger or a fool sends to the HTTP API of a real cluster: refused, named, never a crash."""

from __future__ import annotations

import json
import random
import socket
import string
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec import inspect

import stoker
from stoker_wire.messages.work import AttachDriver
from tests.e2e._cluster import embedded
from tests.e2e.http import _http_api as shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.server.request import BoundRoute

PROBES = {"/healthz", "/readyz"}
OPEN_ON_LOOPBACK = PROBES | {"/metrics", "/openapi.json"}
ALL = pytest.mark.parametrize("pair", shared.ROUTES, ids=shared.label)
POSTS = [pair for pair in shared.ROUTES if pair[1].method == "POST"]
MEGABYTE = 1_000_000
CHANGES = "/v1/changes"
"""Answers have no end: it is never asked for what it grants."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, shared.Api]]:
    """The three services of a cluster that nothing else uses."""
    with embedded(tmp_path_factory.mktemp("s"), num_cpus=1, num_gpus=0) as info:
        gcs = shared.Api(info.address, info.token)
        (node,) = gcs.items("/v1/nodes")
        yield {
            "gcs": gcs,
            "scheduler": shared.Api(gcs("GET", "/v1/leaders/scheduler").json["url"], info.token),
            "nodelet": shared.Api(node["url"], info.token),
        }
        assert stoker.get(stoker.remote(lambda: 1).remote(), timeout=40) == 1, "it still works"


# Who may come in


@ALL
def test_without_the_token_nothing_is_told(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    path = shared.filled(route.path, {})
    for token in ("", "wrong", "\u00e4\u00df"):
        answer = services[name](route.method, path, token=token)
        if path in OPEN_ON_LOOPBACK:
            assert answer.status == 200
        elif route.public:  # a page, or what it is made of; a session is begun by a token alone
            assert answer.status in (200, 401, 404)
        else:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"


@ALL
def test_web_pages_and_rebound_names_are_refused(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    path = shared.filled(route.path, {})
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        answer = services[name](route.method, path, headers=headers)
        assert answer.status == 403
        if route.method != "HEAD":
            assert answer.json["field"] in headers


# Bounds


@pytest.mark.parametrize("field", ["resources", "label_selector"])
def test_a_request_with_thousands_of_names_is_refused(
    services: dict[str, shared.Api], field: str
) -> None:
    many = {f"r{i}": 1 if field == "resources" else "a" for i in range(20_000)}
    demand = {"job_id": "job_1", "resources": {}, field: many}
    for name, path, body, at in (
        ("scheduler", "/v1/explain", demand, field),
        ("gcs", "/v1/jobs", {"entrypoint": "true", field: many}, field),
    ):
        answer = services[name]("POST", path, body)
        assert (answer.status, answer.json["field"]) == (400, at)
        assert "256" in answer.json["detail"]


# Queries and ids


@ALL
def test_an_unknown_query_field_is_named(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    path = shared.filled(route.path, {})
    wrong = f"{route.query_names[0]}s" if route.query_names else "nonsense"
    answer = services[name](route.method, path, **{wrong: "1"})
    assert answer.status == 400
    if route.method != "HEAD":
        assert answer.json["field"] == wrong
        assert (
            not route.query_names
            or f"did you mean {route.query_names[0]!r}" in answer.json["detail"]
        )


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in shared.ROUTES
        if "{" in pair[1].path
        and pair[1].method in ("GET", "DELETE")
        and pair[1].path not in ("/v1/kv/{namespace}", "/v1/leaders/{name}")
        and pair[1].socket is None
    ],
    ids=shared.label,
)
def test_an_id_that_nothing_has_is_not_found(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    for id_ in ("job_4c1f\u2026", "../../x", "x" * 3000, "a\x00b"):
        answer = services[name](route.method, shared.filled(route.path, {}, id_))
        assert answer.status in ((404, 400) if "\x00" in id_ or "hash" in route.path else (404,))
        assert answer.json["code"] in ("not_found", "bad_request")


@pytest.mark.parametrize("pair", [p for p in shared.ROUTES if p[1].query_names], ids=shared.label)
def test_an_empty_value_of_a_query_is_no_filter_that_lets_all_through(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    for field in set(route.query_names) - {"cursor", "prefix"}:
        answer = services[name](route.method, shared.filled(route.path, {}), **{field: ""})
        assert (answer.status, answer.json["field"]) == (400, field)


@pytest.mark.parametrize("pair", [p for p in shared.ROUTES if p[1].query_names], ids=shared.label)
def test_values_of_a_query_never_break_a_service(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    path = shared.filled(route.path, {})
    for field in route.query_names:
        if field == "watch":
            continue  # A watch that is granted has no end.
        for value in (
            "",
            "-2" if path == CHANGES else "-1",
            "1e999",
            "9" * 40,
            "\x00",
            "\u0663",
            "x" * 3000,
            "[]",
        ):
            answer = services[name](route.method, path, **{field: value})
            assert answer.status < 500 or answer.status == 503, (field, value, answer.raw)


# Bodies


def bodies(route: BoundRoute, rng: random.Random) -> Iterator[bytes]:
    """Bodies that are wrong, each in its own way."""
    yield from (b"", b"{}", b"[]", b"null", b"1", b'"x"', b"{", b"\xff\xfe", b"[" * 2000)
    yield b'{"a":' * 2000
    yield b'{"\\u0000": "\\ud800"}'
    names = [field.encode_name for field in fields_of(route)]
    for _ in range(12):
        yield json.dumps({name: value_of(name, rng) for name in names}).encode()
    for name in names:
        yield json.dumps({name: value_of(name, rng)}).encode()


def value_of(name: str, rng: random.Random) -> Any:
    """A random value, but no later epoch: that is how a new leader ends the say of the one there is."""
    value = anything(rng)
    return -value if name == "epoch" and isinstance(value, int) else value


def fields_of(route: BoundRoute) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The declared members of a route's body."""
    is_struct = isinstance(route.body, type) and issubclass(route.body, msgspec.Struct)
    return msgspec.structs.fields(route.body) if is_struct else ()


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value of a type that nobody asked for."""
    kinds = 10 if depth < 3 else 8
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice((0, -1, 2**31, 2**63, -(2**63), 10**30))
        case 3:
            return rng.choice((1.5, -0.0, 1e308))
        case 4 | 5:
            return "".join(
                rng.choices(string.printable + "\x00\u00e9\U0001f600", k=rng.randrange(9))
            )
        case 6:
            return rng.choice(("../../x", "x" * 5000, "job_1", "CPU"))
        case 7:
            return []
        case 8:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {
                rng.choice(("CPU", "job_id", "", "\x00", "demand")): anything(rng, depth + 1)
                for _ in range(rng.randrange(4))
            }


def unbounded(info: inspect.Type, where: str, seen: set[type]) -> Iterator[str]:
    """The places of integers in a type that may be larger than 64 bits."""
    match info:
        case inspect.Metadata(type=inner):
            yield from unbounded(inner, where, seen)
        case inspect.IntType(le=None, lt=None):
            yield where
        case inspect.StructType(cls=cls, fields=members) if cls not in seen:
            seen.add(cls)
            for member in members:
                yield from unbounded(member.type, f"{cls.__name__}.{member.name}", seen)
        case inspect.UnionType(types=parts) | inspect.TupleType(item_types=parts):
            for part in parts:
                yield from unbounded(part, where, seen)
        case inspect.DictType(key_type=key, value_type=value):
            yield from unbounded(key, where, seen)
            yield from unbounded(value, where, seen)
        case inspect.CollectionType(item_type=item):
            yield from unbounded(item, where, seen)


def test_every_integer_of_a_request_is_bounded() -> None:
    seen: set[type] = set()
    bodies = [route.body for _, route in shared.ROUTES if isinstance(route.body, type)]
    assert [w for body in bodies for w in unbounded(inspect.type_info(body), "", seen)] == []
    assert AttachDriver in seen


@pytest.mark.parametrize("pair", POSTS, ids=shared.label)
def test_no_body_makes_a_service_fail(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute], seed: int
) -> None:
    name, route = pair
    rng = random.Random(f"{seed} {route.path}")
    path = shared.filled(route.path, {})
    headers = {"Stoker-Timeout-S": "2"}
    for body in bodies(route, rng):
        for content_type in ("application/json", "application/msgpack"):
            answer = services[name](
                "POST", path, body, headers={**headers, "Content-Type": content_type}
            )
            assert answer.status < 500 or answer.status in (503, 504, 507), (body[:300], answer.raw)
    junk = rng.randbytes(MEGABYTE)
    status = services[name]("POST", path, junk).status
    assert status in (400, 404) or (status == 200 and route.body is None), "none is looked at"


@pytest.mark.parametrize("pair", [p for p in POSTS if fields_of(p[1])], ids=shared.label)
def test_a_bad_body_names_the_field(
    services: dict[str, shared.Api], pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    path = shared.filled(route.path, {})
    names = {field.encode_name for field in fields_of(route)}
    for field in fields_of(route):
        answer = services[name]("POST", path, {field.encode_name: {"no such": ["thing"]}})
        assert answer.status == 400, (field.encode_name, answer.raw)
        assert answer.json.get("field", "").split(".")[0] in names
    answer = services[name]("POST", path, {"no_such_field": 1})
    assert answer.status == 400
    required = {field.encode_name for field in fields_of(route) if field.required}
    assert answer.json["field"] in required | {"no_such_field"}


NODE = {
    "node_id": "n_1", "url": "http://127.0.0.1:1", "unix": "", "hostname": "h", "host_id": "h",
    "pid": 1, "resources": {"CPU": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/nodes", {**NODE, "node_id": "../x"}, "node_id"),
        ("/v1/nodes", {**NODE, "url": "x"}, "url"),
        ("/v1/nodes", {**NODE, "url": "http://[::1"}, "url"),
        ("/v1/nodes", {**NODE, "resources": {"GPU": 1e12}}, "resources.GPU"),
        ("/v1/nodes", {**NODE, "resources": {"CPU": -1}}, "resources.CPU"),
        ("/v1/explain", {"job_id": "job_1", "resources": {"CPU": 1e308}}, "resources.CPU"),
        ("/v1/jobs", {"entrypoint": "a\0b"}, "entrypoint"),
        ("/v1/jobs", {"entrypoint": "a", "job_id": "../x"}, "job_id"),
        ("/v1/jobs", {"entrypoint": "a", "runtime_env": {"env_vars": {"A": "\0"}}},
         "runtime_env.env_vars.A"),
    ],
)  # fmt: skip
def test_values_that_would_harm_others_are_refused_at_the_door(
    services: dict[str, shared.Api], path: str, body: dict[str, Any], field: str
) -> None:
    answer = services["gcs"]("POST", path, body)
    assert (answer.status, answer.json["field"]) == (400, field), answer.raw


# Below HTTP


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/jobs/%ff%fe HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n\r\n",
        b"GET /v1/jobs?state=%ff HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nHost: [::1\r\nOrigin: http://[::1\r\n\r\n",
    ],
    ids=repr,
)
def test_bytes_that_are_no_request_are_refused(
    services: dict[str, shared.Api], sent: bytes
) -> None:
    for api in services.values():
        parts = urlsplit(api.url)
        assert parts.hostname is not None
        with socket.create_connection((parts.hostname, parts.port or 80), timeout=40) as peer:
            peer.sendall(sent.replace(b"TOKEN", api.token.encode()))
            said = peer.recv(65536)
        assert b"Traceback" not in said
        assert said.startswith(b"HTTP/1.") or not said
        status = int(said.split()[1]) if said else 400
        assert status in (200, 400, 401, 403, 404), said
