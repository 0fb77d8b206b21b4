"""Connections without a token: few, not for long, and never the last descriptors of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.http.server import connections
from tests.unit.wire.conftest import TOKEN
from tests.unit.wire.orders import orders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_wire.http.server.service import Service
    from tests.unit.wire.conftest import Cluster

HANG_S = 20.0


class Peer:
    """A raw connection to a service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, *, token: str | None = None) -> None:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
        if token is not None:
            head += f"Authorization: Bearer {token}\r\n"
        self.writer.write(f"{head}\r\n".encode())

    async def answer(self) -> tuple[int, str]:
        """The status and the head of an answer; its body is read as well."""
        async with asyncio.timeout(HANG_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
            await self.reader.readexactly(int(length))
        return int(head.split()[1]), head.lower()

    async def closed(self) -> None:
        """Return when the service has closed the connection."""
        async with asyncio.timeout(HANG_S):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionResetError:
                pass


class Door:
    """A service, and connections to it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.service: Service
        self._peers: list[Peer] = []

    async def open(self, **settings: Any) -> None:
        self.service = await self._cluster.start(orders(self._cluster, **settings))

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.service.port))
        self._peers.append(peer)
        return peer

    async def proven(self) -> Peer:
        """A connection that has shown its token."""
        peer = await self.connect()
        peer.send("/healthz", token=TOKEN)
        assert (await peer.answer())[0] == 200
        return peer

    async def close(self) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()


@pytest.fixture
async def door(cluster: Cluster) -> AsyncIterator[Door]:
    made = Door(cluster)
    yield made
    await made.close()


@pytest.mark.parametrize("sent", [b"", b"GET /v1/orders/7 HTTP/1.1\r\nHost: loc", b"POST /v1"])
async def test_a_connection_that_shows_no_token_in_time_is_closed(door: Door, sent: bytes) -> None:
    await door.open(unproven_s=0.05)
    peer = await door.connect()
    peer.writer.write(sent)
    await peer.closed()
    assert not len(door.service.connections)


async def test_one_that_has_shown_its_token_stays_open(door: Door) -> None:
    await door.open(unproven_s=0.2)
    proven, silent = await door.proven(), await door.connect()
    await silent.closed()
    proven.send("/healthz")
    status, head = await proven.answer()
    assert status == 200
    assert "connection: close" not in head


async def test_of_too_many_without_a_token_the_oldest_is_closed(door: Door) -> None:
    await door.open(unproven_connections=2)
    proven = await door.proven()
    first, second, third = [await door.connect() for _ in range(3)]
    await first.closed()
    for peer in (second, third, proven):
        peer.send("/healthz")
        assert (await peer.answer())[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/metrics", 200), ("/v1/x", 401)])
async def test_a_connection_is_closed_after_an_answer_that_took_no_token(
    door: Door, path: str, status: int
) -> None:
    await door.open()
    peer = await door.connect()
    peer.send(path)
    got, head = await peer.answer()
    assert (got, "connection: close" in head) == (status, True)
    await peer.closed()


async def test_the_last_descriptors_are_not_for_connections(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await door.open()
    highest = os.dup(0)
    os.close(highest)
    monkeypatch.setattr(connections, "open_files_limit", lambda: highest)
    for _ in range(2):
        await (await door.connect()).closed()
    assert caplog.text.count(f"may have {highest} files open") == 1
    monkeypatch.setattr(connections, "open_files_limit", lambda: highest + 1000)
    peer = await door.connect()
    peer.send("/healthz")
    assert (await peer.answer())[0] == 200


async def test_what_came_while_the_process_was_stopped_is_read_first(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LATE_S", 0.05)
    await door.open(unproven_s=0.05)
    peer = await door.connect()
    peer.send("/healthz", token=TOKEN)
    time.sleep(0.2)  # noqa: ASYNC251 - as a stopped process does
    assert (await peer.answer())[0] == 200
