"""Connections that have not finished their handshake: few, not for long, and no harm to others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import PortInUseError
from stoker_wire.process.event_loop import new_loop
from stoker_wire.tls import listener
from stoker_wire.tls.contexts import client_context
from tests.unit.wire.conftest import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.wire.tls.conftest import Certs

WAIT_S = 20.0


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)
        ]


async def ended(line: socket.socket) -> bool:
    """Whether the other end has closed, once it has."""
    line.setblocking(False)
    try:
        async with asyncio.timeout(WAIT_S):
            return not await asyncio.get_running_loop().sock_recv(line, 1)
    except ConnectionResetError:
        return True


async def test_of_too_many_silent_connections_the_oldest_end_and_a_client_gets_in(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKES", 8)
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    with silent(service.port, 12) as lines:
        for line in lines[:4]:
            assert await ended(line)
        await cluster.client(service, settings=service.settings).call("GET", "/readyz")


async def test_a_silent_connection_ends_by_its_deadline(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.1)
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    with silent(service.port, 3) as lines:
        assert all([await ended(line) for line in lines])


async def test_a_stop_does_not_wait_for_handshakes(cluster: Cluster, certs: Certs) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    with silent(service.port, 3) as lines:
        await cluster.client(service, settings=service.settings).call("GET", "/readyz")
        async with asyncio.timeout(WAIT_S):
            await service.stop()
        assert all([await ended(line) for line in lines])


async def test_a_port_in_use_is_named_with_the_fix(cluster: Cluster, certs: Certs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"(?s)127.0.0.1:{port}.*STOKER_PORT"):
            await cluster.service(**certs.settings("mutual")).start("127.0.0.1", port)


@pytest.mark.logs("TLS: a client sent plain HTTP")
async def test_the_log_says_where_a_client_that_fails_is(
    cluster: Cluster, certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    with silent(service.port, 1) as [line]:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await ended(line)
    assert "(from 127.0.0.1)" in caplog.text


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(certs: Certs) -> None:
    """On both kinds of loop: the server's protocol gets it although it was not there yet."""
    for loop_factory in (asyncio.new_event_loop, new_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(ask_at_once(certs))


async def some(line: socket.socket) -> bytes:
    async with asyncio.timeout(WAIT_S):
        data = await asyncio.get_running_loop().sock_recv(line, 65536)
    assert data, "the server has closed the connection"
    return data


async def ask_at_once(certs: Certs) -> None:
    cluster = Cluster()
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    loop = asyncio.get_running_loop()
    for _ in range(20):
        line = socket.create_connection(("127.0.0.1", service.port))
        line.setblocking(False)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = client_context(certs.files("mutual", "me"))
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        await loop.sock_sendall(line, outgoing.read())
        while True:
            incoming.write(await some(line))
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                continue
        tls.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await loop.sock_sendall(line, outgoing.read())  # with the last of the handshake
        answer = b""
        async with asyncio.timeout(WAIT_S):
            while not answer:
                incoming.write(await some(line))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer = tls.read(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        line.close()
    await cluster.end()
