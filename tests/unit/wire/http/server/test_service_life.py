"""A service from its start to its stop: sockets, readiness, what it lets finish, what it tells."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import (
    NotReadyError,
    PortInUseError,
    StartError,
    StokerError,
    UnavailableError,
)
from tests.unit.wire.orders import Order, Receipt, orders

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


async def test_v1_waits_for_readiness_and_health_does_not(cluster: Cluster) -> None:
    service = orders(cluster)

    async def early(req: Request) -> None:
        return None

    service.route("GET", "/v1/early", early, before_ready=True, summary="Early.")
    await cluster.start(service)
    service.ready(False)
    client = cluster.client(service)
    await client.call("GET", "/healthz")
    await client.call("GET", "/v1/early")
    for method, path in (("GET", "/readyz"), ("POST", "/v1/orders/7")):
        with pytest.raises(NotReadyError):
            await client.call(method, path, retry=False)
    service.ready()
    await client.call("GET", "/readyz")
    await client.call("POST", "/v1/orders/7", Order(name="x"))


async def test_a_port_in_use_is_named_with_the_fix(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"(?s)127.0.0.1:{port}.*STOKER_PORT"):
            await cluster.service().start("127.0.0.1", port)


async def test_an_address_of_another_machine_cannot_be_bound(cluster: Cluster) -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1"):
        await cluster.service().start("192.0.2.1", 0)


async def test_a_unix_socket_is_private_and_gone_after_stop(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.touch()  # Left by a process that was killed.
    service = orders(cluster)
    await cluster.start(service, host=None, unix_path=path)
    assert path.stat().st_mode & 0o777 == 0o600
    client = cluster.client(service, unix_path=str(path))
    assert (await client.call("POST", "/v1/orders/7", Order(name="x"), reply=Receipt)).count == 1
    await service.stop()
    assert not path.exists()
    with pytest.raises(StartError, match="107 bytes"):
        await cluster.service().start(None, unix_path=tmp_path / ("x" * 120))


async def test_stop_lets_a_request_finish_and_takes_no_new_one(cluster: Cluster) -> None:
    service = cluster.service()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(req: Request) -> Receipt:
        entered.set()
        await leave.wait()
        return Receipt(name="done", count=1)

    service.route("GET", "/v1/slow", slow, reply=Receipt, summary="Slow.")
    client = cluster.client(await cluster.start(service))
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(client.call("GET", "/v1/slow", reply=Receipt))
        await entered.wait()
        stop = group.create_task(service.stop(grace_s=10))
        await service.stopping.wait()
        assert not service.is_ready
        with pytest.raises(UnavailableError):
            await cluster.client(service).call("GET", "/v1/slow", retry=False)
        assert not stop.done()
        leave.set()
    assert answer.result().name == "done"


async def test_stop_cuts_off_a_request_after_the_grace(cluster: Cluster) -> None:
    service = cluster.service()
    entered = asyncio.Event()

    async def endless(req: Request) -> None:
        entered.set()
        await asyncio.Event().wait()

    service.route("GET", "/v1/endless", endless, summary="Endless.")
    client = cluster.client(await cluster.start(service))
    async with asyncio.TaskGroup() as group:
        call = group.create_task(_outcome(client.call("GET", "/v1/endless", retry=False)))
        await entered.wait()
        await service.stop(grace_s=0.01)
    assert isinstance(call.result(), UnavailableError)


async def _outcome(call: Any) -> object:
    try:
        return await call
    except StokerError as error:
        return error


async def test_a_websocket_carries_bytes_and_closes_when_the_service_stops(
    cluster: Cluster,
) -> None:
    service = cluster.service()

    async def echo(req: Request, ws: Any) -> None:
        async for message in ws:
            await ws.send_bytes(message.data * 2)

    most = 10 << 20
    service.websocket("/v1/echo/{id}", echo, summary="Echoes.", max_msg_bytes=most)
    client = cluster.client(await cluster.start(service))
    ws = await client.ws("/v1/echo/1", max_msg_bytes=most)
    await ws.send_bytes(b"x" * (5 * 1024 * 1024))
    assert len((await ws.receive()).data) == 10 * 1024 * 1024
    async with asyncio.TaskGroup() as group:
        group.create_task(service.stop(grace_s=5))
        closed = await ws.receive()
        await ws.close()
    assert closed.data == 1001
    with pytest.raises(UnavailableError):
        await client.ws("/v1/echo/1")


async def test_metrics_count_by_route_template(cluster: Cluster) -> None:
    service = orders(cluster)
    nodes = {"ALIVE": 2, 'odd "\\\n': 0.5}
    service.metrics.show("stoker_nodes", lambda: nodes)
    client = cluster.client(await cluster.start(service))
    for id_ in ("1", "2"):
        await client.call("POST", f"/v1/orders/{id_}", Order(name="x"))
    text = (await client.call("GET", "/metrics", raw=True)).decode()
    line = 'stoker_http_requests_total{method="POST",route="/v1/orders/{id}",status="200"} 2'
    assert line in text
    assert 'stoker_nodes{state="ALIVE"} 2\n' in text
    assert 'stoker_nodes{state="odd \\"\\\\\\n"} 0.5\n' in text
    assert "stoker_http_requests_in_progress 1" in text


async def test_a_request_id_follows_a_chain_of_calls(cluster: Cluster) -> None:
    back, front = cluster.service(), cluster.service()
    seen: list[str] = []

    async def last(req: Request) -> None:
        seen.append(req.request_id)

    back.route("POST", "/v1/last", last, summary="Last.")
    behind = cluster.client(await cluster.start(back))

    async def first(req: Request) -> None:
        seen.append(req.request_id)
        await behind.call("POST", "/v1/last")

    front.route("POST", "/v1/first", first, summary="First.")
    await cluster.client(await cluster.start(front)).call("POST", "/v1/first")
    assert len(seen) == 2
    assert seen[0] == seen[1]


async def test_stop_does_not_wait_for_a_reader_that_never_says_goodbye(cluster: Cluster) -> None:
    service = cluster.service()

    async def listen(req: Request, ws: Any) -> None:
        async for _ in ws:
            pass

    service.websocket("/v1/listen", listen, summary="Listens.")
    client = cluster.client(await cluster.start(service))
    sockets = [await client.ws("/v1/listen", heartbeat_s=None) for _ in range(3)]
    async with asyncio.timeout(30):  # and no heartbeat would end it
        await service.stop(grace_s=0.05)
    assert not service.dispatcher.live
    for ws in sockets:
        await ws.close()
