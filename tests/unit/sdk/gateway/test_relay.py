"""Joined connections: every byte goes over in order, however slow an end is, and an end is one for both."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from stoker.gateway.relay import Held, Joint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAIT_S = 30.0


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[socket.socket, socket.socket, list[Joint]]]:
    """The far ends of two joined connections, and the joints that have ended."""
    loop = asyncio.get_running_loop()
    ended: list[Joint] = []
    (a, near_a), (b, near_b) = socket.socketpair(), socket.socketpair()
    for end in (a, b):
        end.setblocking(False)
    one, _ = await loop.create_connection(Held, sock=near_a)
    other, _ = await loop.create_connection(Held, sock=near_b)
    joint = Joint(ended.append)
    joint.join(one, other)
    try:
        yield a, b, ended
    finally:
        joint.abort()
        a.close()
        b.close()


async def over(ended: list[Joint]) -> None:
    while not ended:  # noqa: ASYNC110  a list has no event
        await asyncio.sleep(0.01)


async def test_all_bytes_go_over_in_both_directions_though_the_reader_is_slow(seed: int) -> None:
    dice = random.Random(seed)
    loop = asyncio.get_running_loop()
    async with joined() as (a, b, _), asyncio.timeout(WAIT_S):

        async def send(end: socket.socket, data: bytes) -> None:
            await loop.sock_sendall(end, data)
            end.shutdown(socket.SHUT_WR)

        async def receive(end: socket.socket) -> str:
            digest = hashlib.sha256()
            while data := await loop.sock_recv(end, dice.choice([100, 1 << 16, 1 << 18])):
                digest.update(data)
                if dice.random() < 0.05:
                    await asyncio.sleep(0.002)
            return digest.hexdigest()

        forth, back = dice.randbytes(8 << 20), dice.randbytes(3 << 20)
        async with asyncio.TaskGroup() as group:
            group.create_task(send(a, forth))
            group.create_task(send(b, back))
            at_b, at_a = group.create_task(receive(b)), group.create_task(receive(a))
    assert at_b.result() == hashlib.sha256(forth).hexdigest()
    assert at_a.result() == hashlib.sha256(back).hexdigest()


async def test_an_end_that_closes_closes_the_other_after_what_it_has_sent() -> None:
    loop = asyncio.get_running_loop()
    async with joined() as (a, b, ended), asyncio.timeout(WAIT_S):
        await loop.sock_sendall(a, b"last words")
        a.close()
        assert await loop.sock_recv(b, 100) == b"last words"
        assert await loop.sock_recv(b, 100) == b""
        b.close()
        await over(ended)
        assert len(ended) == 1


async def test_a_slow_end_holds_back_who_sends() -> None:
    loop = asyncio.get_running_loop()
    async with joined() as (a, _, __):
        sent = 0
        try:
            async with asyncio.timeout(1.0):
                while True:
                    await loop.sock_sendall(a, b"x" * (1 << 16))
                    sent += 1 << 16
        except TimeoutError:
            pass
    assert sent < 64 << 20, "what nobody reads fills no memory"


async def test_one_that_was_closed_before_it_is_joined_ends_the_other() -> None:
    loop = asyncio.get_running_loop()
    ended: list[Joint] = []
    (a, near_a), (b, near_b) = socket.socketpair(), socket.socketpair()
    one, _ = await loop.create_connection(Held, sock=near_a)
    other, _ = await loop.create_connection(Held, sock=near_b)
    one.abort()
    Joint(ended.append).join(one, other)
    b.setblocking(False)
    async with asyncio.timeout(WAIT_S):
        assert await loop.sock_recv(b, 10) == b""
        await over(ended)
    a.close()
    b.close()
