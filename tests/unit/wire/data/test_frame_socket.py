"""Frames over a socket: whole, in order and once, however the bytes are cut on their way."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.data import channel, frame_socket
from stoker_wire.data.frame_socket import MAX_FRAME_NBYTES, FrameSocket, length_prefix
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.common import Address

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (
    0,
    1,
    7,
    8,
    63,
    64,
    1000,
    65_527,
    65_528,
    65_535,
    65_536,
    65_537,
    262_135,
    262_144,
    700_000,
)
WAIT_S = 60.0


class End:
    """One end of a connection, and what arrives there."""

    def __init__(self, sock: socket.socket, received: bytes = b"") -> None:
        sock.setblocking(False)
        self.frames: list[bytes] = []
        self.closed = 0
        self.arrived = asyncio.Event()
        self.socket = FrameSocket(sock, received)

    def start(self) -> End:
        self.socket.start(self._take, self._end)
        return self

    def _take(self, frames: list[Any]) -> None:
        self.frames += [bytes(frame) for frame in frames]
        self.arrived.set()

    def _end(self) -> None:
        self.closed += 1
        self.arrived.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.frames) < count and not self.closed:
                self.arrived.clear()
                await self.arrived.wait()


def framed(frames: list[bytes]) -> bytes:
    return b"".join(length_prefix(len(frame)) + frame for frame in frames)


def some(seed: int, count: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice(SIZES)) for _ in range(count)]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("case", range(20))
async def test_frames_arrive_whole_however_they_are_cut(
    case: int, seed: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    chance = random.Random(seed + case)
    frames = some(seed + case, 12)
    stream = framed(frames)
    ours, theirs = pair
    theirs.setblocking(False)
    first = chance.randint(0, min(len(stream), 1 << 18))  # read before, with the HTTP answer
    end = End(ours, stream[:first]).start()
    loop = asyncio.get_running_loop()
    at = first
    while at < len(stream):
        cut = chance.choice((1, 3, 8, 100, 5000, 100_000))
        await loop.sock_sendall(theirs, stream[at : at + cut])
        at += cut
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    await end.until(len(frames))
    assert end.frames == frames
    end.socket.close()


async def test_both_ends_send_much_at_once(
    seed: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    """More than the socket takes, in many parts: each side goes on as the other reads."""
    left, right = End(pair[0]).start(), End(pair[1]).start()
    there, back = some(seed, 60), some(seed + 1, 60)
    for end, frames in ((left, there), (right, back)):
        for frame in frames:
            parts = [
                length_prefix(len(frame)),
                *(frame[i : i + 999] for i in range(0, len(frame), 999)),
            ]
            end.socket.send(parts)
    await asyncio.gather(left.until(60), right.until(60))
    assert right.frames == there and left.frames == back
    await asyncio.gather(left.socket.drain(), right.socket.drain())
    left.socket.close()
    await right.until(61)
    assert (left.closed, right.closed) == (1, 1)


async def test_frames_before_the_start_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = End(pair[0]), End(pair[1])
    for frame in (b"hello", b"two", b"three"):
        left.socket.send([length_prefix(len(frame)), frame])
    async with asyncio.timeout(WAIT_S):
        assert await right.socket.receive() == b"hello"
    right.start()
    await right.until(2)
    assert right.frames == [b"two", b"three"]
    left.socket.close()
    right.socket.close()


async def test_a_peer_that_leaves_in_the_middle_of_a_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    end = End(pair[0]).start()
    pair[1].sendall(framed([b"whole"]) + length_prefix(100_000) + b"half")
    pair[1].close()
    await end.until(9)
    assert (end.frames, end.closed) == ([b"whole"], 1)
    end.socket.send([b"lost"])
    end.socket.close()
    assert end.closed == 1


async def test_who_waits_for_the_first_frame_learns_of_the_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    end = End(pair[0])
    asyncio.get_running_loop().call_soon(pair[1].close)
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(WAIT_S):
            await end.socket.receive()


@pytest.mark.parametrize("nbytes", [MAX_FRAME_NBYTES + 1, 1 << 60])
async def test_a_frame_that_nobody_could_hold_ends_the_connection(
    pair: tuple[socket.socket, socket.socket], nbytes: int
) -> None:
    end = End(pair[0]).start()
    pair[1].sendall(framed([b"ok"]) + struct.pack("<Q", nbytes))
    await end.until(9)
    assert (end.frames, end.closed) == ([b"ok"], 1)


async def test_a_frame_without_memory_for_it_ends_the_connection(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = End(pair[0]).start()

    def fail(_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(frame_socket, "bytearray", fail, raising=False)
    pair[1].sendall(framed([b"ok"]) + struct.pack("<Q", MAX_FRAME_NBYTES))
    await end.until(9)
    assert (end.frames, end.closed) == ([b"ok"], 1)


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_socket_that_others_closed_ends_without_an_error(loops: str) -> None:
    """uvloop gives a descriptor up only as its reader is removed: then there is none for the writer."""
    errors: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        ours, theirs = socket.socketpair()
        end = End(ours).start()
        ours.close()
        theirs.close()  # uvloop tells of it
        await asyncio.sleep(0)
        end.socket.close()
        assert end.closed == 1

    factory = pytest.importorskip("uvloop").new_event_loop if loops == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert not errors


async def test_a_handshake_that_is_cancelled_ends_its_frames(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].setblocking(False)
    frames = FrameSocket(pair[0])
    me = Address(peer_id="p", node_id="n", host_id="h", unix="", url="")
    task = asyncio.create_task(channel._shake_hands(frames, me, "job"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert frames.closed
