"""A client of several URLs stays where it is answered, and asks another one when that one is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import DeadlineExceededError, NotReadyError, UnavailableError
from stoker_wire.http.client.client import Client
from stoker_wire.http.client.endpoints import Endpoints, checked_address
from stoker_wire.messages.common import Record
from tests.services import ReservedPort
from tests.unit.wire.conftest import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster


class Who(Record):
    name: str


class Replica:
    """A service that says its name, at once or (``hold``) never; ``silent`` is not ready either."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self.asked = 0
        self.hold = asyncio.Event()
        self.hold.set()
        service.route("GET", "/v1/who", self.who, reply=Who, summary="Say name.")
        service.websocket("/v1/line", self.line, summary="Hold line.")

    async def who(self, _: Request) -> Who:
        self.asked += 1
        await self.hold.wait()
        return Who(name=self.name)

    async def line(self, _: Request, ws: web.WebSocketResponse) -> None:
        async for _message in ws:
            pass


@pytest.fixture
async def replicas(cluster: Cluster) -> list[Replica]:
    made = [Replica(cluster.service(), name) for name in ("a", "b")]
    for replica in made:
        await cluster.start(replica.service)
    return made


@pytest.fixture
async def client(replicas: list[Replica]) -> AsyncIterator[Client]:
    address = ",".join(replica.service.url for replica in replicas)
    async with Client(address, token=TOKEN, peer="tester") as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def who(client: Client, **options: object) -> str:
    return (await client.call("GET", "/v1/who", reply=Who, **options)).name  # type: ignore[call-overload, no-any-return]


def test_an_address_is_one_url_or_several_each_once() -> None:
    several = Endpoints("http://a:1/, http://b:2,http://a:1")
    assert several.urls == ("http://a:1", "http://b:2")
    assert several.leave("http://a:1") and several.current == "http://b:2"
    assert several.leave("http://a:1") and several.current == "http://b:2", "it was left before"
    assert not Endpoints("http://a:1").leave("http://a:1")
    assert checked_address("a:1, b:2/") == "http://a:1,http://b:2"


async def test_it_stays_where_it_is_answered(client: Client, replicas: list[Replica]) -> None:
    assert {await who(client) for _ in range(5)} == {"a"}
    await replicas[0].service.stop(grace_s=0.1)
    assert {await who(client) for _ in range(5)} == {"b"}
    assert replicas[1].asked == 5


async def test_a_refused_connection_is_no_try(replicas: list[Replica]) -> None:
    gone = ReservedPort()
    address = f"http://127.0.0.1:{gone},{replicas[1].service.url}"
    async with Client(address, token=TOKEN, peer="tester") as client:
        assert await who(client, retry=False) == "b"
    assert HttpClient(address, token=TOKEN).base_url == address
    answer = await asyncio.to_thread(
        HttpClient(address, token=TOKEN).call, "GET", "/v1/who", reply=Who
    )
    assert answer.name == "b"


async def test_errors_name_all_urls() -> None:
    ports = ReservedPort(), ReservedPort()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with Client(",".join(urls), token=TOKEN, peer="tester") as client:
        with pytest.raises(DeadlineExceededError) as late:
            await who(client, timeout_s=0.2)
        with pytest.raises(UnavailableError) as refused:
            await who(client, retry=False)
    for error in (late, refused):
        assert all(url in str(error.value) for url in urls), error.value


async def test_what_is_slow_at_a_ready_replica_is_waited_for(
    client: Client, replicas: list[Replica]
) -> None:
    replicas[0].hold.clear()
    slow = asyncio.ensure_future(who(client))
    watch = client._replicas
    assert watch is not None
    await until(lambda: watch._probed_at_s > 0)  # it was asked meanwhile
    replicas[0].hold.set()
    assert await slow == "a"
    assert replicas[1].asked == 0


async def test_a_silent_replica_that_is_not_ready_is_left_with_all_that_is_under_way(
    client: Client, replicas: list[Replica]
) -> None:
    line = await client.ws("/v1/line")
    url = client.url
    replicas[0].hold.clear()

    async def listen() -> None:
        async with client.attend(url):
            await line.receive()

    listening = asyncio.ensure_future(listen())
    asking = asyncio.ensure_future(who(client))
    await until(lambda: replicas[0].asked > 0)
    replicas[0].service.ready(False)
    assert await asking == "b"
    with pytest.raises(UnavailableError, match="is asked now"):
        await listening
    await line.close()
    assert client.url == replicas[1].service.url


async def test_a_thread_leaves_a_silent_replica_too(replicas: list[Replica]) -> None:
    replicas[0].hold.clear()
    address = ",".join(replica.service.url for replica in replicas)
    asking = asyncio.ensure_future(
        asyncio.to_thread(HttpClient(address, token=TOKEN).call, "GET", "/v1/who", reply=Who)
    )
    await until(lambda: replicas[0].asked > 0)
    replicas[0].service.ready(False)
    assert (await asking).name == "b"


async def test_no_move_helps_where_no_replica_is_ready(
    client: Client, replicas: list[Replica]
) -> None:
    for replica in replicas:
        replica.service.ready(False)
    with pytest.raises((NotReadyError, DeadlineExceededError), match="has not finished starting"):
        await who(client, timeout_s=0.3)
