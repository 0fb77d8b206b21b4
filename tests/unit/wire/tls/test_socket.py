"""Frames over TLS: whole, in order and once, however slowly the sockets take and bring them."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from stoker_wire.data.channel import PATH, Channel, accept, connect
from stoker_wire.data.frame_socket import FrameSocket, length_prefix
from stoker_wire.errors import TlsError, UnavailableError
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Cancel, DataMessage
from stoker_wire.tls.contexts import client_context, server_context
from stoker_wire.tls.files import TlsFiles
from stoker_wire.tls.listener import TlsSite
from stoker_wire.tls.socket import TlsSocket, client_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.unit.wire.tls.conftest import Certs

SIZES = (0, 1, 7, 1000, 16_383, 16_384, 16_385, 65_536, 262_144, 700_000, 3_000_000)
WAIT_S = 30.0


class End:
    """One end of a connection, and what arrives there."""

    def __init__(self, sock: TlsSocket) -> None:
        self.frames: list[bytes] = []
        self.arrived = asyncio.Event()
        self.closed = False
        self.socket = FrameSocket(sock)
        self.socket.start(self._take, self._end)

    def _take(self, frames: list[Any]) -> None:
        self.frames += [bytes(frame) for frame in frames]
        self.arrived.set()

    def _end(self) -> None:
        self.closed = True
        self.arrived.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.frames) < count and not self.closed:
                self.arrived.clear()
                await self.arrived.wait()


async def connected(certs: Certs, *, buffer_nbytes: int = 0) -> tuple[TlsSocket, TlsSocket]:
    """Two ends whose handshake is done; the kernel's buffers are as small as is asked."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        if buffer_nbytes:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    files = certs.files("mutual")
    client = client_socket(ends[0], client_context(files), "localhost")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = server_context(files).wrap_bio(incoming, outgoing, server_side=True)
    server = TlsSocket(ends[1], tls, incoming, outgoing)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(client.shake_hands())
        group.create_task(accepted(tls, server))
    return client, server


async def accepted(tls: ssl.SSLObject, server: TlsSocket) -> None:
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await server._send_encrypted()
            await server._receive_encrypted()
        else:
            return


@pytest.mark.parametrize("buffer_nbytes", [0, 4096])
async def test_frames_arrive_whole_in_order_and_once_both_ways(
    certs: Certs, seed: int, buffer_nbytes: int
) -> None:
    one, two = (End(sock) for sock in await connected(certs, buffer_nbytes=buffer_nbytes))
    chance = random.Random(seed)
    sent = [[chance.randbytes(chance.choice(SIZES)) for _ in range(40)] for _ in range(2)]
    for left, right in zip(*sent, strict=True):
        one.socket.send([length_prefix(len(left)), left])
        two.socket.send([length_prefix(len(right)) + right])
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.gather(two.until(40), one.until(40))
    assert two.frames == sent[0]
    assert one.frames == sent[1]
    one.socket.close()
    await two.until(41)
    assert two.closed
    two.socket.close()


async def test_what_drain_waits_for_includes_what_is_encrypted_already(certs: Certs) -> None:
    client, server = await connected(certs, buffer_nbytes=4096)
    one = End(client)
    data = bytes(100_000)
    one.socket.send([length_prefix(len(data)), data])
    drained = asyncio.ensure_future(one.socket.drain())
    await asyncio.sleep(0)
    assert not drained.done()  # the other end reads nothing yet
    two = End(server)
    await two.until(1)
    await asyncio.wait_for(drained, WAIT_S)
    one.socket.close()
    two.socket.close()


async def test_a_reader_that_waits_for_the_descriptor_misses_nothing(certs: Certs) -> None:
    """A thread polls it: what has arrived must have been handed over, or be read by the loop."""
    client, server = await connected(certs)
    two = End(server)
    two.socket.pause_reading()
    frames = [bytes([at]) * 40_000 for at in range(200)]
    one = End(client)
    for frame in frames:
        one.socket.send([length_prefix(len(frame)), frame])
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(server.fileno(), readable.set)
    async with asyncio.timeout(WAIT_S):
        while len(two.frames) < len(frames):
            readable.clear()
            await asyncio.wait(
                [asyncio.ensure_future(readable.wait()), asyncio.ensure_future(two.arrived.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            two.arrived.clear()
            if readable.is_set():
                two.socket.read()
    assert two.frames == frames
    loop.remove_reader(server.fileno())
    one.socket.close()
    two.socket.close()


async def test_bytes_that_are_no_tls_close_the_connection(certs: Certs) -> None:
    client, server = await connected(certs)
    two = End(server)
    client._sock.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
    await two.until(1)
    assert two.closed
    assert two.frames == []
    client.close()


# -- channels ------------------------------------------------------------------------------------------


@pytest.fixture
async def listen(certs: Certs) -> AsyncIterator[Callable[..., Any]]:
    """Start what accepts channels over TLS; the URL, and a queue of the channels."""
    runners: list[web.AppRunner] = []

    async def start(files: TlsFiles) -> tuple[str, asyncio.Queue[Channel]]:
        channels: asyncio.Queue[Channel] = asyncio.Queue()

        async def take(request: web.Request) -> web.StreamResponse:
            me = Address("w_server", "", "", "", "")
            channel = await accept(request, me=me, job_id="j_1")
            if channel is not None:
                channels.put_nowait(channel)
            return web.Response()

        app = web.Application()
        app.router.add_get(PATH, take)
        runner = web.AppRunner(app, access_log=None)
        runners.append(runner)
        await runner.setup()
        sock = socket.create_server(("127.0.0.1", 0))
        await TlsSite(runner, server_context(files), sock=sock).start()
        return f"https://127.0.0.1:{sock.getsockname()[1]}", channels

    yield start
    for runner in runners:
        await runner.cleanup()


async def opened(url: str, files: TlsFiles) -> Channel:
    peer, me = Address("w_server", "", "", "", url), Address("d_client", "", "", "", "")
    return await connect(
        peer, path="", me=me, job_id="j_1", authorization="Channel j_1  x", tls=files
    )


async def test_a_channel_goes_on_with_the_tls_of_the_http_request_that_began_it(
    certs: Certs, listen: Any
) -> None:
    url, accepted = await listen(certs.files("mutual"))
    mine = await opened(url, certs.files("mutual", "me"))
    theirs = await asyncio.wait_for(accepted.get(), WAIT_S)
    heard: dict[str, list[DataMessage]] = {"mine": [], "theirs": []}
    arrived = asyncio.Event()

    def take(name: str) -> Callable[[Channel, list[DataMessage]], None]:
        def took(_: Channel, messages: list[DataMessage]) -> None:
            heard[name] += messages
            arrived.set()

        return took

    loop = asyncio.get_running_loop()
    for name, channel in (("mine", mine), ("theirs", theirs)):
        channel.start(take(name), lambda _: None, loop.call_soon)
    messages = [Cancel(task_id=f"t_{at}") for at in range(1000)]
    for message in messages:
        mine.post(message)
        theirs.post(message)
    async with asyncio.timeout(WAIT_S):
        while min(len(got) for got in heard.values()) < len(messages):
            arrived.clear()
            await arrived.wait()
    assert heard == {"mine": messages, "theirs": messages}
    await mine.close()
    await theirs.close()


@pytest.mark.logs("TLS: a client")
async def test_a_channel_is_refused_for_what_an_http_client_is_refused_for(
    certs: Certs, listen: Any, other: Certs
) -> None:
    url, _ = await listen(certs.files("mutual"))
    with pytest.raises(TlsError, match="STOKER_TLS_CERT"):
        await opened(url, certs.trusting())
    with pytest.raises(TlsError, match="STOKER_TLS_CA"):
        await opened(url, other.files("mutual"))
    with pytest.raises(TlsError, match="https://"):
        await opened(url.replace("https", "http"), certs.files("mutual"))
    with pytest.raises(UnavailableError):
        await opened(url.replace("https", "http"), TlsFiles())
