"""Ports inside of processes outside: whose they are, who waits there, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from stoker.gateway import listeners as module
from stoker.gateway.listeners import Listeners
from stoker_wire.errors import ConflictError, NotFoundError, UnavailableError
from stoker_wire.tls.files import TlsFiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "127.0.0.1"


class Line:
    """The connection to a process, as far as a listener uses it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.came = asyncio.Event()
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.said += data.decode().split()
        self.came.set()

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
async def held() -> AsyncIterator[Listeners]:
    made = Listeners(HOST, HOST, TlsFiles())
    yield made
    await made.close()


async def test_who_comes_is_told_and_taken_once(held: Listeners) -> None:
    listener, line = await held.open("p_1", "alice", 0), Line()
    listener.attach(line)  # type: ignore[arg-type]
    assert held.url_of(listener) == f"http://{HOST}:{listener.port.number}"
    assert held.is_one(HOST, listener.port.number) and not held.is_one(HOST, 1)
    _, writer = await asyncio.open_connection(HOST, listener.port.number)
    async with asyncio.timeout(20):
        await line.came.wait()
    (connection_id,) = line.said
    next_line: Any = Line()
    listener.attach(next_line)
    assert line.aborted and next_line.said == [connection_id], "told again on a new line"
    taken = held.take(connection_id)
    with pytest.raises(NotFoundError):
        held.take(connection_id)
    taken.transport.abort()
    writer.close()


async def test_a_connection_that_nobody_takes_is_closed(
    held: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKEN_WITHIN_S", 0.05)
    listener = await held.open("p_1", "alice", 0)
    reader, writer = await asyncio.open_connection(HOST, listener.port.number)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read(1) == b""
    writer.close()


async def test_a_port_outlives_its_line_for_a_while(held: Listeners) -> None:
    listener, line, later = await held.open("p_1", "alice", 0), Line(), Line()
    number = listener.port.number
    listener.attach(line)  # type: ignore[arg-type]
    held.line_lost("p_1", line, 1.0)  # type: ignore[arg-type]
    assert await held.open("p_1", "alice", 0) is listener, "its process came back in time"
    listener.attach(later)  # type: ignore[arg-type]
    await asyncio.sleep(1.3)
    assert held.is_one(HOST, number)
    held.line_lost("p_1", later, 0.0)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        while held.is_one(HOST, number):  # noqa: ASYNC110  its end has no event
            await asyncio.sleep(0.01)


async def test_a_port_is_its_users_alone_and_one_user_has_not_all(
    held: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PORTS_OF_ONE", 2)
    await held.open("p_1", "alice", 0)
    with pytest.raises(ConflictError, match="alice"):
        await held.open("p_1", "mallory", 0)
    await held.open("p_2", "alice", 0)
    with pytest.raises(UnavailableError, match="2 of one user"):
        await held.open("p_3", "alice", 0)
    await held.open("p_3", "bob", 0)
