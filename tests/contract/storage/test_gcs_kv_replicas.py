"""Keys of the gcs at several replicas, across lost answers, kills and restarts: each change counts once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

import pytest

from stoker_wire.errors import ConflictError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.control import KvAdd, KvPut
from tests.contract.gcs_support import TOKEN, gcs, migrate
from tests.contract.storage._kv import do, events_of, read, value_of
from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class TestReplicas:
    @pytest.fixture
    async def pair(self, postgres_url: str) -> AsyncIterator[tuple[Client, Client]]:
        await migrate(postgres_url)
        async with gcs(postgres_url) as (_, a), gcs(postgres_url) as (_, b):
            yield a, b

    async def test_both_count_at_once_and_nothing_is_lost(
        self, pair: tuple[Client, Client]
    ) -> None:
        replies = await asyncio.gather(
            *(do(client, KvAdd(key="n")) for _ in range(50) for client in pair)
        )
        assert sorted(int(reply.value or b"") for reply in replies) == list(range(1, 101))
        assert [await value_of(client, "n") for client in pair] == [b"100", b"100"]

    async def test_a_race_at_both_has_one_winner(self, pair: tuple[Client, Client]) -> None:
        async def wins(client: Client, revision: int, name: str) -> bool:
            body = KvPut(key="k", value=name.encode(), if_revision=revision)
            try:
                return (await do(client, body)).entry is not None
            except ConflictError:
                return False

        revision = 0
        for _ in range(5):
            won = await asyncio.gather(
                *(wins(client, revision, f"{i}") for i, client in enumerate(pair * 5))
            )
            assert won.count(True) == 1
            item = await read(pair[0], "k")
            assert item is not None and item.value == b"%d" % won.index(True)
            revision = item.revision

    async def test_a_retry_at_the_other_replica_counts_once(
        self, pair: tuple[Client, Client]
    ) -> None:
        for i in range(5):
            replies = await asyncio.gather(
                *(do(client, KvAdd(key="n"), key=f"r{i}") for client in pair * 3)
            )
            assert {reply.value for reply in replies} == {b"%d" % (i + 1)}
        assert await value_of(pair[0], "n") == b"5"

    async def test_both_watches_see_the_same(self, pair: tuple[Client, Client]) -> None:
        watches = [asyncio.ensure_future(events_of(client, 40, prefix="n")) for client in pair]
        await asyncio.gather(*(do(client, KvAdd(key="n")) for _ in range(20) for client in pair))
        seen = [[event.payload["value"] for event in await watch] for watch in watches]
        assert seen[0] == seen[1] and len(set(seen[0])) == 40


@asynccontextmanager
async def _process(
    database_url: str, port: ReservedPort
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [
        sys.executable, "-m", "stoker_gcs",
        "--database-url", database_url, "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {**os.environ, "STOKER_TOKEN": TOKEN, "STOKER_LOG_LEVEL": "error"}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class LossyProxy:
    """A proxy to a port that passes all on, but for the replies that it is told to lose.

    A lost reply is one that the gcs has sent, so what it answers is committed. ``lost`` runs before the
    caller's connection breaks.
    """

    def __init__(self, target: ReservedPort, lost: Callable[[], Awaitable[None]]) -> None:
        self._target = target
        self._lost = lost
        self.to_lose = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target.number)
        except OSError:
            writer.close()
            return
        sending = asyncio.ensure_future(self._pass(reader, back))
        try:
            while part := await there.read(65536):
                if self.to_lose:
                    self.to_lose -= 1
                    await self._lost()
                    return
                writer.write(part)
        except ConnectionError:
            return
        finally:
            sending.cancel()
            writer.close()
            back.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)


async def test_a_change_counts_once_whose_gcs_was_killed_before_its_answer_arrived(
    durable_url: str,
) -> None:
    port = ReservedPort()
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(_process(durable_url, port))]

        async def restart() -> None:
            running[-1].send_signal(signal.SIGKILL)
            await running[-1].wait()
            running.append(await stack.enter_async_context(_process(durable_url, port)))

        proxy = await stack.enter_async_context(LossyProxy(port, restart))
        client = await stack.enter_async_context(
            Client(f"http://127.0.0.1:{proxy.port}", token=TOKEN, peer="test", timeout_s=60.0)
        )
        await client.call("GET", "/readyz", raw=True)
        for body, reply in (
            (KvAdd(key="n"), b"1"),
            (KvPut(key="k", value=b"mine", if_absent=True), None),
            (KvAdd(key="n"), b"2"),
        ):
            proxy.to_lose = 1
            done = await do(client, body)
            assert proxy.to_lose == 0 and done.entry is not None and done.value == reply
        assert len(running) == 4
        assert await value_of(client, "n") == b"2"


async def test_a_retry_after_a_restart_counts_once(durable_url: str) -> None:
    replies = []
    for _ in range(2):
        async with gcs(durable_url) as (_, client):
            replies.append(await do(client, KvAdd(key="n", amount=4), key="once"))
            assert await value_of(client, "n") == b"4"
    assert replies[0] == replies[1]
