"""A service by the rules of the protocol: what it takes, how it answers and waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pytest
from aiohttp import WSCloseCode, WSMsgType

from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    PayloadTooLargeError,
    ProtocolError,
    UnavailableError,
)
from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import MAX_MSG_NBYTES, Route, WebSocketRoute
from stoker_wire.http.server.service import Reply, Request
from stoker_wire.messages.common import Message
from stoker_wire.version import PROTOCOL, PROTOCOL_TEXT
from tests.unit.wire.orders import Order, Receipt, orders

if TYPE_CHECKING:
    from aiohttp import web

    from tests.unit.wire.conftest import Cluster


class Filter(Message):
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100
    verbose: bool = False
    name: str = ""


class Price(Message):
    cents: int


async def test_messages_go_both_ways_in_msgpack_and_in_json(cluster: Cluster) -> None:
    service = await cluster.start(orders(cluster))
    client = cluster.client(service)
    reply = await client.call("POST", "/v1/orders/7", Order(name="x", count=2), reply=Receipt)
    assert reply == Receipt(name="x", count=2, path="7")
    async with client.session.post(f"{service.url}/v1/orders/7", data=b'{"name": "x"}') as answer:
        assert answer.content_type == "application/json"
        assert await answer.json() == {"name": "x", "count": 1, "path": "7"}
        assert answer.headers["Stoker-Protocol"] == PROTOCOL_TEXT
        assert answer.headers["X-Request-Id"].startswith("r_")


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"names": "x"}, "names", "did you mean 'name'?"),
        ({}, "name", "required"),
        ({"name": 3}, "name", "expected `str`, got `int`"),
        ({"name": "x", "count": 0}, "count", ">= 1"),
        ({"name": "x", "resources": {"GPU": 1, "CPU": "two"}}, "resources.CPU", "`float`"),
        ({"name": "x", "parts": [{}, {"weights": 1}]}, "parts.1.weights", "'weight'"),
        ({"name": "x", "parts": [{"tags": {"a": 1, "b": "c"}}]}, "parts.0.tags.b", "`int`"),
        ({"name": "x", "extra": {"tag": {}}}, "extra.tag", "'tags'"),
        ([], None, "expected `object`, got `array`"),
    ],
)
@pytest.mark.parametrize("format", ["json", "msgpack"])
async def test_a_bad_member_is_named(
    cluster: Cluster, body: object, field: str | None, says: str, format: str
) -> None:
    service = await cluster.start(orders(cluster))
    encode = getattr(msgspec, format).encode
    session = cluster.client(service).session
    async with session.post(
        f"{service.url}/v1/orders/7",
        data=encode(body),
        headers={"Content-Type": f"application/{format}"},
    ) as reply:
        problem = await reply.json(content_type=None)
    assert (reply.status, problem.get("field")) == (400, field)
    assert says in problem["detail"]


@pytest.mark.parametrize(
    ("raw", "content_type"), [(b'{"name', "application/json"), (b"\x82\xa1", "application/msgpack")]
)
async def test_a_broken_body_is_a_bad_request(
    cluster: Cluster, raw: bytes, content_type: str
) -> None:
    service = await cluster.start(orders(cluster))
    session = cluster.client(service).session
    async with session.post(
        f"{service.url}/v1/orders/7", data=raw, headers={"Content-Type": content_type}
    ) as reply:
        assert (await reply.json(content_type=None))["code"] == "bad_request"


async def test_queries_are_converted_and_unknown_ones_named(cluster: Cluster) -> None:
    service = cluster.service()

    async def show(req: Request) -> Filter:
        found: Filter = req.query
        return found

    service.route("GET", "/v1/things", show, query=Filter, reply=Filter, summary="Things.")
    client = cluster.client(await cluster.start(service))
    query = {"limit": 3, "verbose": True, "name": "a&b=c", "absent": None}
    found = await client.call("GET", "/v1/things", query=query, reply=Filter)
    assert found == Filter(limit=3, verbose=True, name="a&b=c")
    for query, field in (
        ({"limits": 3}, "limits"),
        ({"limit": "x"}, "limit"),
        ({"limit": 0}, "limit"),
    ):
        with pytest.raises(BadRequestError) as caught:
            await client.call("GET", "/v1/things", query=query)
        assert caught.value.field == field


async def test_unknown_routes_and_methods_are_problems(cluster: Cluster) -> None:
    service = await cluster.start(orders(cluster))
    client = cluster.client(service)
    with pytest.raises(NotFoundError, match="no route /v1/order"):
        await client.call("GET", "/v1/order")
    async with client.session.get(f"{service.url}/v1/orders/7") as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        assert (await reply.json(content_type=None))["code"] == "bad_request"


async def test_raw_bodies_replies_and_statuses(cluster: Cluster) -> None:
    service = cluster.service()

    async def store(req: Request) -> Reply:
        return Reply((await req.read())[::-1], status=201, headers={"ETag": '"1"'})

    async def nothing(req: Request) -> None:
        return None

    service.route("PUT", "/v1/blob", store, raw_body=True, summary="Store.")
    service.route("DELETE", "/v1/blob", nothing, summary="Delete.")
    client = cluster.client(await cluster.start(service))
    assert await client.call("PUT", "/v1/blob", b"abc", raw=True) == b"cba"
    assert await client.call("DELETE", "/v1/blob", raw=True) == b""
    await client.call("DELETE", "/v1/blob")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_by_name(cluster: Cluster, chunked: bool) -> None:
    service = orders(cluster, max_body_bytes=2000)
    session = cluster.client(await cluster.start(service)).session

    async def parts() -> Any:
        for _ in range(30):
            yield b"x" * 100

    data = parts() if chunked else b"x" * 3000
    async with session.post(f"{service.url}/v1/orders/7", data=data) as reply:
        problem = await reply.json(content_type=None)
    assert (reply.status, problem["code"]) == (413, PayloadTooLargeError.code)
    assert "2000 bytes of POST /v1/orders/{id}" in problem["detail"]


async def test_a_passed_deadline_says_what_it_waited_for(cluster: Cluster) -> None:
    service = cluster.service()
    cancelled = asyncio.Event()

    async def wait(req: Request) -> None:
        req.waiting_for("a lease on node n_1", explain="/v1/tasks/t_1/explain")
        assert 0 < req.deadline_s <= 0.5
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    service.route("GET", "/v1/wait", wait, summary="Waits.")
    session = cluster.client(await cluster.start(service)).session
    async with session.get(f"{service.url}/v1/wait", headers={"Stoker-Timeout-S": "0.5"}) as reply:
        problem = await reply.json(content_type=None)
    assert (reply.status, problem["code"]) == (504, DeadlineExceededError.code)
    assert problem["detail"] == (
        "GET /v1/wait passed its deadline of 0.5 s while it waited for a lease on node n_1"
    )
    assert problem["explain"] == "/v1/tasks/t_1/explain"
    assert cancelled.is_set()


@pytest.mark.parametrize("header", ["soon", "-1", "nan", "1e9"])
async def test_a_bad_timeout_header_is_named(cluster: Cluster, header: str) -> None:
    service = await cluster.start(cluster.service())
    session = cluster.client(service).session
    async with session.get(f"{service.url}/healthz", headers={"Stoker-Timeout-S": header}) as reply:
        assert (await reply.json(content_type=None))["field"] == "Stoker-Timeout-S"


async def test_a_bug_is_a_500_with_the_request_id_and_no_trace(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    service = cluster.service()

    async def crash(req: Request) -> None:
        raise ZeroDivisionError("the secret")

    service.route("GET", "/v1/crash", crash, summary="Crashes.")
    client = cluster.client(await cluster.start(service))
    with pytest.raises(InternalError, match=r"(?s)a bug in gcs\..* request id r_\w+") as caught:
        await client.call("GET", "/v1/crash")
    assert "secret" not in str(caught.value)


async def test_an_error_in_a_started_stream_breaks_the_connection(cluster: Cluster) -> None:
    from aiohttp import web

    service = cluster.service()

    async def cut(req: Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(req.http)
        await response.write(b"half")
        raise NotFoundError("gone")

    service.route("GET", "/v1/cut", cut, stream=True, summary="Cuts.")
    client = cluster.client(await cluster.start(service))
    with pytest.raises(UnavailableError):
        await client.call("GET", "/v1/cut", raw=True, retry=False)


@pytest.mark.parametrize(
    ("theirs", "accepted"),
    [("4.0", True), ("4.1", True), ("4.2", False), ("3.1", False), ("5.0", False), ("x", False)],
)
async def test_protocols_may_be_one_minor_version_apart(
    cluster: Cluster, theirs: str, accepted: bool
) -> None:
    service = await cluster.start(orders(cluster))
    session = cluster.client(service, peer="nodelet n_1").session
    async with session.post(
        f"{service.url}/v1/orders/7",
        data=b'{"name":"x"}',
        headers={"Stoker-Protocol": theirs},
    ) as reply:
        if accepted:
            assert reply.status == 200
            return
        problem = await reply.json(content_type=None)
        if theirs == "x":
            assert problem["field"] == "Stoker-Protocol"
            return
        assert (reply.status, problem["code"]) == (409, ProtocolError.code)
        older = "nodelet n_1" if theirs == "3.1" else "gcs"
        assert problem["detail"].endswith(f"upgrade {older}")


async def test_only_a_newer_sender_may_send_fields_that_are_not_known(cluster: Cluster) -> None:
    service = await cluster.start(orders(cluster))
    session = cluster.client(service).session
    major, minor = PROTOCOL
    body = b'{"name":"x","new":1,"parts":[{"newer":{"a":1}}],"extra":{"tag":{"newest":2}}}'
    for step, status in ((1, 200), (0, 400), (-1, 400)):
        headers = {"Stoker-Protocol": f"{major}.{minor + step}"}
        async with session.post(
            f"{service.url}/v1/orders/7?later=1", data=body, headers=headers
        ) as reply:
            assert reply.status == status, await reply.text()
        bad = b'{"name":3,"new":1}'
        async with session.post(f"{service.url}/v1/orders/7", data=bad, headers=headers) as reply:
            assert reply.status == 400
        async with session.get(f"{service.url}/v1/later", headers=headers) as reply:
            problem = await reply.json(content_type=None)
            assert reply.status == 404
            assert ("upgrade gcs" in problem["detail"]) is (step == 1)


async def test_a_key_that_is_too_long_is_named(cluster: Cluster) -> None:
    client = cluster.client(await cluster.start(orders(cluster)))
    with pytest.raises(BadRequestError, match="1 to 255 characters, got 300"):
        await client.call("POST", "/v1/orders/1", Order(name="x"), idempotency_key="k" * 300)


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a.b:c-d_1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
async def test_a_request_id_that_is_long_or_odd_is_replaced(
    cluster: Cluster, given: str, taken: bool
) -> None:
    service = await cluster.start(orders(cluster))
    session = cluster.client(service).session
    async with session.get(f"{service.url}/healthz", headers={"X-Request-Id": given}) as reply:
        answer = reply.headers["X-Request-Id"]
    assert (answer == given) is taken
    assert taken or answer.startswith("r_")


async def test_a_reply_of_another_shape_is_an_error_that_says_so(cluster: Cluster) -> None:
    client = cluster.client(await cluster.start(orders(cluster)))
    with pytest.raises(InternalError, match="same version"):
        await client.call("POST", "/v1/orders/1", Order(name="x"), reply=Price)


async def test_a_table_of_routes_is_bound_to_its_owner(cluster: Cluster) -> None:
    class Greeter:
        def __init__(self, word: str) -> None:
            self.word = word

        async def greet(self, req: Request) -> dict[str, str]:
            return {"said": f"{self.word} {req.path['name']}"}

        async def echo(self, req: Request, socket: web.WebSocketResponse) -> None:
            async for message in socket:
                await socket.send_str(f"{self.word} {message.data}")

    table = (
        Route("GET", "/v1/greet/{name}", Greeter.greet, roles=READERS, summary="Greet"),
        WebSocketRoute("/v1/echo", Greeter.echo, roles=READERS, summary="Echo"),
    )
    service = cluster.service()
    service.add_routes(table, Greeter("hello"))
    await cluster.start(service)
    client = cluster.client(service)
    reply = await client.call("GET", "/v1/greet/ann", reply=dict[str, str])
    assert reply == {"said": "hello ann"}
    async with await client.ws("/v1/echo") as socket:
        await socket.send_str("you")
        assert await socket.receive_str() == "hello you"


@pytest.mark.parametrize("binary", [False, True])
async def test_a_long_message_ends_a_websocket(cluster: Cluster, binary: bool) -> None:
    service = cluster.service()
    lengths: list[int] = []

    async def measure(req: Request, ws: web.WebSocketResponse) -> None:
        async for message in ws:
            if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                lengths.append(len(message.data))

    service.websocket("/v1/measure", measure, summary="Measure")
    client = cluster.client(await cluster.start(service))
    async with await client.ws("/v1/measure", max_msg_bytes=1 << 20) as ws:
        for nbytes in (MAX_MSG_NBYTES, MAX_MSG_NBYTES + 1):
            await (ws.send_bytes(bytes(nbytes)) if binary else ws.send_str("x" * nbytes))
        closed = await ws.receive()
    assert (closed.type, closed.data) == (WSMsgType.CLOSE, WSCloseCode.MESSAGE_TOO_BIG)
    assert lengths == [MAX_MSG_NBYTES]


async def test_a_websocket_without_a_limit_is_a_bug(cluster: Cluster) -> None:
    async def never(req: Request, ws: web.WebSocketResponse) -> None: ...

    with pytest.raises(InternalError, match="no limit of messages"):
        cluster.service().websocket("/v1/never", never, summary="Never", max_msg_bytes=0)


async def test_a_client_takes_no_long_message_either(cluster: Cluster) -> None:
    service = cluster.service()

    async def flood(req: Request, ws: web.WebSocketResponse) -> None:
        await ws.send_bytes(bytes(1 << 20))

    service.websocket("/v1/flood", flood, summary="Flood")
    client = cluster.client(await cluster.start(service))
    async with await client.ws("/v1/flood") as ws:
        message = await ws.receive()
    assert message.type is not WSMsgType.BINARY
    assert ws.close_code == WSCloseCode.MESSAGE_TOO_BIG
