"""One contract for every ephemeral store, and what Redis coming and going means."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.ephemeral.redis import RedisEphemeralStore
from tests.contract.gcs_support import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.ephemeral.protocol import EphemeralStore
    from tests.services import RedisServer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
async def ephemeral(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[EphemeralStore]:
    made: EphemeralStore
    if request.param == "memory":
        made = MemoryEphemeralStore(clock)
    else:
        made = RedisEphemeralStore(request.getfixturevalue("redis_url"), clock)
    await made.start(lambda seq: None)
    if request.param == "redis":
        await eventually(lambda: is_shared(made), "Redis answers")
    yield made
    await made.stop()


async def is_shared(ephemeral: EphemeralStore) -> bool:
    return ephemeral.shared


async def test_facts_are_kept_replaced_removed_and_expire(
    ephemeral: EphemeralStore, clock: Clock
) -> None:
    ephemeral.put("heartbeats", "n_1", b"one", 10)
    ephemeral.put("heartbeats", "n_2", b"two", 3)
    ephemeral.put("other", "n_1", b"x", 10)
    assert await ephemeral.all("heartbeats") == {"n_1": b"one", "n_2": b"two"}
    ephemeral.put("heartbeats", "n_1", b"new", 10)
    clock.now_s += 5
    assert await ephemeral.all("heartbeats") == {"n_1": b"new"}
    ephemeral.remove("heartbeats", "n_1")
    await eventually(lambda: is_gone(ephemeral), "the entry is removed")
    assert await ephemeral.all("never") == {}


async def is_gone(ephemeral: EphemeralStore) -> bool:
    return await ephemeral.all("heartbeats") == {}


async def test_replicas_share_facts_and_news(redis_url: str) -> None:
    heard: list[int] = []
    seqs = itertools.count(1)
    one, two = RedisEphemeralStore(redis_url), RedisEphemeralStore(redis_url)
    await one.start(lambda seq: None)
    await two.start(heard.append)

    async def met() -> bool:
        one.put("heartbeats", "n_1", b"x", 10)
        one.announce(next(seqs))  # What is said before the other listens is not heard.
        return heard != [] and await two.all("heartbeats") == {"n_1": b"x"}

    await eventually(met, "the other replica subscribed")
    await one.stop()
    await two.stop()


async def test_a_connection_that_closes_before_its_first_write_is_made_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that is about to end accepts it and closes it; uvloop then raises a RuntimeError."""
    closed, write = [True] * 4, asyncio.StreamWriter.writelines

    def writelines(writer: asyncio.StreamWriter, data: Any) -> None:
        if closed:
            closed.pop()
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
        write(writer, data)

    monkeypatch.setattr(asyncio.StreamWriter, "writelines", writelines)
    ephemeral = RedisEphemeralStore(redis_url)
    await ephemeral.start(lambda seq: None)

    async def joined() -> bool:
        return ephemeral.shared and ephemeral.subscribed

    await eventually(joined, "it writes and listens")
    assert not closed
    await ephemeral.stop()


@pytest.mark.logs(r"Redis does not answer")
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_redis_may_vanish_and_gets_every_fact_again(own_redis: RedisServer, how: str) -> None:
    ephemeral = RedisEphemeralStore(own_redis.url)
    await ephemeral.start(lambda seq: None)
    await eventually(lambda: is_shared(ephemeral), "Redis answers")
    ephemeral.put("heartbeats", "n_1", b"before", 100)
    own_redis.stop() if how == "killed" else own_redis.pause()

    async def noticed() -> bool:
        ephemeral.put("heartbeats", "n_2", b"during", 100)
        return ephemeral.degraded

    await eventually(noticed, "the loss of Redis is noticed")
    async with asyncio.timeout(30):  # a frozen Redis would hold it up for ever
        assert await ephemeral.all("heartbeats") == {"n_1": b"before", "n_2": b"during"}
    await asyncio.to_thread(own_redis.start if how == "killed" else own_redis.resume)
    await eventually(lambda: is_shared(ephemeral), "Redis is back")
    fresh = RedisEphemeralStore(own_redis.url)
    await fresh.start(lambda seq: None)
    await eventually(lambda: is_shared(fresh), "Redis answers")
    assert await fresh.all("heartbeats") == {"n_1": b"before", "n_2": b"during"}
    await ephemeral.stop()
    await fresh.stop()


async def test_redis_that_was_emptied_gets_every_fact_again(own_redis: RedisServer) -> None:
    one, two = RedisEphemeralStore(own_redis.url), RedisEphemeralStore(own_redis.url)
    for each in (one, two):
        await each.start(lambda seq: None)
        await eventually(lambda each=each: is_shared(each), "Redis answers")
    one.put("heartbeats", "n_1", b"never again", 1000)

    async def is_there() -> bool:
        return await two.all("heartbeats") == {"n_1": b"never again"}

    await eventually(is_there, "the other replica sees it")
    await asyncio.to_thread(own_redis.flush)
    assert not await is_there()
    await eventually(is_there, "the other replica sees it again")
    assert one.shared and two.shared
    await one.stop()
    await two.stop()
