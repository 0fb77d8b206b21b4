"""PostgreSQL on a full disk, read-only and frozen: named, and waited for until it goes on by itself."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import asyncpg
import pytest

from stoker_gcs.store import postgres as store
from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.messages.control import KvEntry
from tests.contract.gcs_support import gcs, migrate
from tests.services import fill, mounted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client
    from tests.services import PostgresServer

DISK_BYTES = 48 << 20
VALUE = os.urandom(40_000)
"""It does not compress, so that each one takes its room."""
READS = 40
"""More than there are connections."""


async def put(client: Client, key: str, *, retry: bool = False) -> KvEntry:
    path = f"/v1/kv/ns/{key}"
    return await client.call("PUT", path, VALUE, reply=KvEntry, retry=retry, timeout_s=40)


@contextmanager
def on_small_disk(server: PostgresServer) -> Iterator[tuple[str, Path]]:
    """A database that has a small file system of its own: the log of transactions is elsewhere."""
    with mounted(server.directory / "small", DISK_BYTES) as disk:
        place = disk / "tables"
        place.mkdir()
        status = server.directory.stat()
        os.chown(place, status.st_uid, status.st_gid)
        server.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        server.execute("CREATE DATABASE small TABLESPACE small")
        try:
            yield server.url("small"), disk
        finally:
            server.drop_database("small")
            server.execute("DROP TABLESPACE small")


@pytest.mark.logs(r"its disk is full", r"could not extend file", r"[Nn]o space left")
async def test_a_full_disk_is_named_loses_nothing_and_is_waited_for(
    own_postgres: PostgresServer,
) -> None:
    with on_small_disk(own_postgres) as (url, disk):
        await migrate(url)
        async with gcs(url) as (running, client):
            await put(client, "before")
            await asyncio.to_thread(fill, disk / "ballast")
            for key in ("a", "b"):
                with pytest.raises(UnavailableError, match=r"(?s)database .*disk is full") as error:
                    while True:  # a page or two may still fit
                        await put(client, key)
                assert error.value.retryable
            assert await client.call("GET", "/v1/kv/ns/before", raw=True) == VALUE
            waiting = asyncio.ensure_future(put(client, "waiting", retry=True))
            await asyncio.wait([waiting], timeout=0.5)
            assert not waiting.done()
            (disk / "ballast").unlink()
            assert (await waiting).key == "waiting"
            assert (await put(client, "after")).key == "after"
            await running.app.retention.enforce()


@pytest.mark.logs(
    r"is read-only", r"read-only transaction", r"due to administrator command", r"does not answer"
)
async def test_a_database_that_takes_no_writes_is_named_and_is_waited_for(
    own_postgres: PostgresServer,
) -> None:
    name = own_postgres.create_database()
    url = own_postgres.url(name)
    await migrate(url)
    async with gcs(url) as (_, client):
        await put(client, "before")
        order = f'ALTER DATABASE "{name}" SET default_transaction_read_only = {{}}'
        await reconnected(own_postgres, name, order.format("on"))
        with pytest.raises(UnavailableError, match="is read-only"):
            await put(client, "a")
        assert await client.call("GET", "/v1/kv/ns/before", raw=True) == VALUE
        await reconnected(own_postgres, name, order.format("off"))
        assert (await put(client, "after", retry=True)).key == "after"


async def reconnected(server: PostgresServer, name: str, order: str) -> None:
    """Give an order that holds for new connections, and end the others."""
    await asyncio.to_thread(server.execute, order)
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    await asyncio.to_thread(server.execute, end)


@asynccontextmanager
async def impatient(url: str, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Running, Client]]:
    """A gcs that waits for its database for half a second only."""
    patch.setattr(store, "CONNECT_TIMEOUT_S", 0.5)
    patch.setattr(store, "COMMAND_TIMEOUT_S", 0.5)
    async with gcs(url) as both:
        yield both


@pytest.mark.logs(
    r"the database .* does not answer", r"not ready", r"has not answered for", "idle-in-trans"
)
async def test_a_database_that_is_frozen_for_longer_than_a_command_may_take_is_waited_for(
    own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.url(own_postgres.create_database())
    await migrate(url)
    async with impatient(url, monkeypatch) as (running, client):
        await put(client, "before")
        own_postgres.pause()
        try:
            calls = [
                *(put(client, f"k{number}") for number in range(3)),
                *(client.call("GET", "/v1/kv/ns", retry=False) for _ in range(READS)),
                running.app.state.store.compact(1),
            ]
            async with asyncio.timeout(30):
                results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                assert isinstance(result, UnavailableError) and result.retryable, repr(result)
            with pytest.raises(StokerError, match=r"not ready|does not answer"):
                await client.call("GET", "/v1/kv/ns", retry=False)
        finally:
            own_postgres.resume()
        assert (await put(client, "after", retry=True)).key == "after"
        assert await client.call("GET", "/v1/kv/ns/before", raw=True) == VALUE


async def test_a_replica_that_froze_before_it_executed_a_statement_holds_up_nobody(
    postgres_url: str,
) -> None:
    await migrate(postgres_url)
    async with gcs(postgres_url) as (_, client):
        name = {"application_name": store._NAME}
        frozen = await asyncpg.connect(postgres_url.replace("+asyncpg", ""), server_settings=name)
        try:
            await frozen.execute(f"BEGIN; {store._LOCK}")
            await frozen.prepare("SELECT 1")  # from now on it is active for the server
            assert (await put(client, "key", retry=True)).key == "key"
        finally:
            frozen.terminate()
