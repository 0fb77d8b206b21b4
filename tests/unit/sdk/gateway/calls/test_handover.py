"""A connection changes hands: its bytes arrive once and in order, and nothing is left where it was."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

import pytest

from stoker.gateway.calls.handover import Receiver, connection_of, hand_over
from stoker.gateway.relay import Held
from stoker_wire.process.background import Background
from stoker_wire.process.event_loop import loop_factory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.SelectorEventLoop, loop_factory()]


@pytest.mark.parametrize("make", LOOPS)
@pytest.mark.parametrize("nbytes", [1, 100_000, 3_000_000])
def test_it_has_what_was_read_and_goes_on(
    make: Callable[[], asyncio.AbstractEventLoop], nbytes: int, tmp_path: Path
) -> None:
    came = os.urandom(nbytes)
    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(_change_hands(str(tmp_path / "s"), came)) == (came, b"behind")


async def _change_hands(path: str, came: bytes) -> tuple[bytes, bytes]:
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[tuple[socket.socket, bytes]] = loop.create_future()
    client, server = socket.socketpair()
    client.setblocking(False)
    async with Background("test") as background:
        receiver = Receiver(path, lambda *it: arrived.set_result(it), background)
        receiver.start()
        transport, _ = await loop.connect_accepted_socket(Held, server)
        before = len(os.listdir("/proc/self/fd"))
        with connection_of(transport) as given:
            await hand_over(path, given, came)
        transport.abort()
        connection, data = await asyncio.wait_for(arrived, 40)
        with client, connection:
            await loop.sock_sendall(client, b"behind")
            behind = await loop.sock_recv(connection, 100)
            await loop.sock_sendall(connection, b"answer")
            assert await loop.sock_recv(client, 100) == b"answer"
        receiver.close()
    assert len(os.listdir("/proc/self/fd")) < before, "no descriptor is left over"
    return data, behind


async def test_without_a_receiver_the_connection_stays(tmp_path: Path) -> None:
    client, server = socket.socketpair()
    with client, server, pytest.raises(OSError, match="No such file"):
        await hand_over(str(tmp_path / "nobody"), server, b"x")
