"""Upgrades to a WebSocket that are none: a bad key, a peer that leaves meanwhile."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.unit.wire.conftest import TOKEN

if TYPE_CHECKING:
    from stoker_wire.http.principals import Principal
    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster

WAIT_S = 30.0
GOOD_KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
RESET = struct.pack("ii", 1, 0)


def listening(cluster: Cluster) -> tuple[Service, list[str]]:
    """A service with a WebSocket that says who has come."""
    service = cluster.service()
    came: list[str] = []

    async def listen(req: Request, ws: Any) -> None:
        came.append(req.request_id)
        async for _ in ws:
            pass

    service.websocket("/v1/listen", listen, summary="Listen.")
    return service, came


def upgrade(key: bytes) -> bytes:
    head = (
        f"GET /v1/listen HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    )
    return head.encode() + b"Sec-WebSocket-Key: " + key + b"\r\n\r\n"


@pytest.mark.parametrize(
    "key", [b"", b"short", b"\xff" * 24, "ключ".encode(), b"=" * 24, b"dGhlIHNhbXBsZSBub25jZQ" * 9]
)
async def test_a_key_that_is_none_is_a_bad_request(
    cluster: Cluster, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    service, came = listening(cluster)
    await cluster.start(service)
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    async with asyncio.timeout(WAIT_S):
        writer.write(upgrade(key))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert not came
    assert not caplog.records


@pytest.mark.parametrize("when", ["before the answer", "while it is written"])
async def test_a_peer_that_leaves_as_it_upgrades_is_no_error(
    cluster: Cluster, when: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = listening(cluster)
    check, sign = service.guard.check, service.dispatcher.sign
    peer: socket.socket
    present: web.Request

    async def leave() -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        peer.close()
        async with asyncio.timeout(WAIT_S):
            while present.transport is not None:  # noqa: ASYNC110 (the end of a socket is no event)
                await asyncio.sleep(0)
        left.set()

    async def late_check(headers: Any, path: str, method: str, *, public: bool) -> Principal:
        await leave()
        return await check(headers, path, method, public=public)

    async def late_sign(http: web.Request, response: web.StreamResponse) -> None:
        await sign(http, response)
        if isinstance(response, web.WebSocketResponse):
            await leave()

    @web.middleware
    async def note(http: web.Request, handler: Any) -> web.StreamResponse:
        nonlocal present
        present = http
        answer: web.StreamResponse = await handler(http)
        return answer

    service._app.middlewares.insert(0, note)
    if when == "before the answer":
        monkeypatch.setattr(service.guard, "check", late_check)
    else:
        service._app.on_response_prepare.append(late_sign)
    await cluster.start(service)
    left = asyncio.Event()
    peer = socket.create_connection(("127.0.0.1", service.port))
    peer.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(peer, upgrade(GOOD_KEY))
    await left.wait()
    async with asyncio.timeout(WAIT_S):
        await service.dispatcher.idle.wait()
    assert not caplog.records
