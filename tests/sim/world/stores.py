"""The database and the Redis of a world: they outlive every gcs, and may refuse or be silent for a while.

The database is the product's memory store. Redis stands behind the product's own store
(:mod:`stoker_gcs.ephemeral.redis`), which has the server's errors and silences to cope with.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker_gcs.ephemeral.redis import TIMEOUT_S
from stoker_gcs.state.schema import EVENTS
from stoker_gcs.store.memory import MemoryStore
from stoker_gcs.store.postgres import COMMAND_TIMEOUT_S
from stoker_wire.errors import UnavailableError
from tests.sim.world.loop import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from stoker_gcs.store.changes import Change, Condition, Row
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event
    from tests.sim.world.loop import Process

COMMIT_S = 0.002
"""How long a commit takes at most."""
LATE_ANSWERS = 0.3
"""How often the answer of a commit comes later than what it wrote is seen."""
REDIS_S = 0.0005
"""How long Redis takes to answer."""


class Trouble:
    """What ails a server: it refuses ("stop") or is silent ("freeze") until that ends."""

    def __init__(self) -> None:
        self.kind = ""
        self._met = 0
        self._ended = asyncio.Event()
        self.at_begin: list[Callable[[], None]] = []

    def begin(self, kind: str) -> None:
        """Begin to refuse, or to be silent."""
        self.kind, self._met, self._ended = kind, 0, asyncio.Event()
        for act in self.at_begin:
            act()

    def end(self) -> int:
        """Answer again; return how many had no answer meanwhile."""
        self.kind = ""
        self._ended.set()
        return self._met

    async def meet(
        self, refusal: Exception, silence: Exception, timeout_s: float | None = None
    ) -> None:
        """Raise if the server refuses; wait while it is silent, for so long."""
        if not self.kind:
            return
        self._met += 1
        if self.kind == "stop":
            raise refusal
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            raise silence from None


class Database(MemoryStore):
    """The SQL database of a world: it takes a moment for each commit.

    One that is shared is a server, whose answer to a commit may be lost, and whose silence ends in an error;
    another is a file, which refuses before anything is written.
    """

    def __init__(self, random: Random, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared  # type: ignore[misc]
        self._random = random
        self.trouble = Trouble()
        self.after_commit: Callable[[], None] = lambda: None

    async def _meet_trouble(self) -> None:
        if self.trouble.kind:
            error = UnavailableError("the database does not answer")
            await self.trouble.meet(error, error, COMMAND_TIMEOUT_S if self.shared else None)

    async def start(self) -> None:
        await self._meet_trouble()

    async def commit(self, changes: Sequence[Change]) -> Any:
        random = self._random.random
        await asyncio.sleep(random() * COMMIT_S)
        await self._meet_trouble()
        results = await super().commit(changes)
        self.after_commit()
        if random() < LATE_ANSWERS:
            await asyncio.sleep(random() * COMMIT_S)
            if self.shared:
                await self._meet_trouble()
        return results

    async def get(self, table: Any, key: Mapping[str, str | int]) -> Row | None:
        await self._meet_trouble()
        return await super().get(table, key)

    async def select(  # type: ignore[override]
        self, table: Any, where: Mapping[str, Condition] | None = None, **more: Any
    ) -> list[Row]:
        await self._meet_trouble()
        if table is EVENTS and where and "subject" in where:
            # As by an index: the log is long.
            wanted = where["subject"]
            subjects = wanted if isinstance(wanted, tuple) else (wanted,)
            every, self._events = self._events, [e for e in self._events if e.subject in subjects]
            try:
                return await super().select(table, where, **more)
            finally:
                self._events = every
        return await super().select(table, where, **more)

    async def count(self, table: Any, *where: Any, **more: Any) -> int:
        await self._meet_trouble()
        return await super().count(table, *where, **more)

    async def distinct(self, table: Any, column: str, *where: Any) -> list[Any]:
        await self._meet_trouble()
        return await super().distinct(table, column, *where)

    async def events(self, after: int, limit: int = 1000) -> list[Event]:
        await self._meet_trouble()
        return await super().events(after, limit)

    async def events_back(self, before: int, limit: int = 1000) -> list[Event]:
        await self._meet_trouble()
        return await super().events_back(before, limit)

    async def bounds(self) -> tuple[int, int]:
        await self._meet_trouble()
        return await super().bounds()

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        await self._meet_trouble()
        await super().put_tasks(rows)

    def newer(self, seq: int) -> list[Event]:
        """Return the events after one, oldest first."""
        newer = list(itertools.takewhile(lambda event: event.seq > seq, reversed(self._events)))
        return newer[::-1]

    def rows(self, name: str, record: type[Any]) -> list[Any]:
        """Return all records of a table."""
        decode = _decoder(record).decode
        return [decode(row["record"]) for row in self._tables[name].values()]


@functools.cache
def _decoder(record: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(record)


class Redis:
    """The Redis server of a world; in place of the class of its clients it makes them."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, bytes]] = {}
        self.subscriptions: list[_Subscription] = []
        self.trouble = Trouble()
        self.trouble.at_begin.append(self._disconnect)

    def from_url(self, _: str, socket_timeout: float | None = None, **__: Any) -> _RedisClient:
        """Return a client."""
        return _RedisClient(self, socket_timeout)

    def flush(self) -> int:
        """Forget everything; return how much that was."""
        count = sum(map(len, self.hashes.values()))
        self.hashes.clear()
        return count

    async def meet_trouble(self, timeout_s: float | None) -> None:
        """Take a moment, and have what ails the server."""
        await asyncio.sleep(REDIS_S)
        await self.trouble.meet(
            RedisConnectionError("refused"), RedisTimeoutError("silent"), timeout_s
        )

    def publish(self, text: str) -> None:
        """Send a message to all that have subscribed."""
        self.subscriptions = [one for one in self.subscriptions if not one.process.dead]
        for one in self.subscriptions:
            one.receive({"data": text})

    def _disconnect(self) -> None:
        if self.trouble.kind == "stop":
            for one in self.subscriptions:
                one.receive(None)
            self.subscriptions.clear()


class _RedisClient:
    """What the product uses of a client of Redis."""

    def __init__(self, redis: Redis, timeout_s: float | None) -> None:
        self._redis, self._timeout_s = redis, timeout_s

    async def hgetall(self, name: str) -> dict[str, bytes]:
        await self._redis.meet_trouble(self._timeout_s)
        return dict(self._redis.hashes.get(name, {}))

    def pipeline(self, *, transaction: bool) -> _Pipeline:
        assert not transaction
        return _Pipeline(self._redis, self._timeout_s)

    def pubsub(self) -> _Subscription:
        return _Subscription(self._redis)

    async def aclose(self) -> None:
        return None


class _Pipeline:
    """Commands that are sent together."""

    def __init__(self, redis: Redis, timeout_s: float | None) -> None:
        self._redis, self._timeout_s = redis, timeout_s
        self._commands: list[Callable[[], object]] = []

    def hset(self, name: str, key: str, value: bytes) -> None:
        hashes = self._redis.hashes
        self._commands.append(lambda: hashes.setdefault(name, {}).__setitem__(key, value))

    def hdel(self, name: str, key: str) -> None:
        self._commands.append(lambda: self._redis.hashes.get(name, {}).pop(key, None))

    def publish(self, _: str, text: str) -> None:
        self._commands.append(lambda: self._redis.publish(text))

    def expire(self, *_: object) -> None:
        """Nothing: no world lasts an hour."""

    def ping(self) -> None:
        """Nothing: the others are answered as well."""

    async def execute(self) -> None:
        await self._redis.meet_trouble(self._timeout_s)
        for command in self._commands:
            command()


class _Subscription:
    """A connection on which messages come."""

    def __init__(self, redis: Redis) -> None:
        process = CURRENT.get()
        assert process is not None
        self.process: Process = process
        self._redis = redis
        self._messages: deque[dict[str, str] | None] = deque()
        self._wake = asyncio.Event()

    async def __aenter__(self) -> _Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self in self._redis.subscriptions:
            self._redis.subscriptions.remove(self)

    async def subscribe(self, _: str) -> None:
        await self._redis.meet_trouble(TIMEOUT_S)
        self._redis.subscriptions.append(self)

    def receive(self, message: dict[str, str] | None) -> None:
        """Take a message; None is the end of the connection."""
        self._messages.append(message)
        self._wake.set()

    async def get_message(self, *, timeout: float, **_: Any) -> dict[str, str] | None:
        try:
            async with asyncio.timeout(timeout):
                while not self._messages:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        message = self._messages.popleft()
        if message is None:
            raise RedisConnectionError("reset")
        return message
