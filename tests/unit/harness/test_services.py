"""The servers that tests run against are real, separate, and gone when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests import leaks
from tests.services import PostgresServer, RedisServer, until

if TYPE_CHECKING:
    from pathlib import Path


def test_redis_is_empty_after_a_restart_on_the_same_port(own_redis: RedisServer) -> None:
    assert own_redis.command("SET colour blue") == "+OK"
    port = own_redis.port
    own_redis.restart()
    assert (own_redis.port, own_redis.command("EXISTS colour")) == (port, ":0")


def test_a_stopped_redis_refuses_and_a_paused_one_hangs(own_redis: RedisServer) -> None:
    own_redis.pause()
    with pytest.raises(TimeoutError):
        own_redis.command("PING", timeout_s=0.2)
    own_redis.resume()
    assert own_redis.command("PING") == "+PONG"
    own_redis.stop()
    with pytest.raises(ConnectionRefusedError):
        own_redis.command("PING")


@pytest.mark.parametrize("turn", [1, 2])
def test_redis_is_flushed_between_tests(
    redis_url: str, redis_server: RedisServer, turn: int
) -> None:
    assert redis_url == redis_server.url
    assert redis_server.command("DBSIZE") == ":0"
    redis_server.command("SET left behind")


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_gets_an_empty_postgres_database(postgres_url: str, turn: int) -> None:
    engine = create_async_engine(postgres_url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE proof (turn int)"))
    await engine.dispose()


async def test_postgres_keeps_its_databases_over_a_restart(own_postgres: PostgresServer) -> None:
    name = own_postgres.create_database()
    own_postgres.stop()
    own_postgres.start()
    connection = await asyncpg.connect(own_postgres.url(name, driver="postgresql"), timeout=40)
    assert await connection.fetchval("SELECT current_database()") == name
    await connection.close()


async def test_postgres_refuses_a_wrong_password(postgres_server: PostgresServer) -> None:
    url = postgres_server.url(driver="postgresql").replace(postgres_server.password, "guess")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(url, timeout=40)


async def test_sqlite_opens_in_a_file_of_its_own(sqlite_url: str, tmp_path: Path) -> None:
    engine = create_async_engine(sqlite_url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE proof (turn int)"))
    await engine.dispose()
    assert (tmp_path / "stoker.sqlite3").exists()


def test_a_condition_that_never_holds_is_named() -> None:
    with pytest.raises(TimeoutError, match="pigs fly"):
        until(lambda: False, 0.02, "pigs fly")


def test_the_leak_check_sees_a_process_and_a_segment_left_behind(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "EXIT_GRACE_S", 0.05)
    monkeypatch.setattr(leaks, "SHM", tmp_path)
    before = leaks.Snapshot.take()
    assert before.leaks() == []
    extra = RedisServer(tmp_path)
    extra.start()
    (tmp_path / "stoker-arena").write_bytes(b"")
    try:
        found = before.leaks()
    finally:
        extra.stop()
    assert [line.split()[0] for line in found] == ["process", "shared"]
