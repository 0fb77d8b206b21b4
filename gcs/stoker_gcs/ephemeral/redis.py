"""The ephemeral store that replicas share over Redis, and that works without it while it is gone.

Every entry is in this process's memory first; a writer sends it to Redis in the background, a few
tens of milliseconds later, many in one round trip. When Redis does not answer, reads fall back
to memory, the writer keeps trying, and once Redis is back (empty or not) it gets all entries again. So it
does when it was emptied meanwhile: each process has a mark there, and looks whether it is still there.

One hash per kind: field = key, value = expiry in seconds since the epoch and the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
import time
import uuid
from typing import TYPE_CHECKING

import redis.asyncio as redis_client
from redis.exceptions import RedisError

from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_gcs.ephemeral.memory import Entry

_log = logging.getLogger(__name__)
_EXPIRY = struct.Struct("<d")
CHANNEL = "stoker:events"
TIMEOUT_S = 1.0
WRITE_EVERY_S = 0.03
RETRY_S = 0.5
CHECK_EVERY_S = 1.0
"""How often an idle writer looks whether Redis still has what it sent."""
HASH_TTL_S = 3600
_GONE = (RedisError, OSError, TimeoutError, RuntimeError)
"""Errors of a server that is gone. RuntimeError is uvloop's: the connection closed before the first write."""


class RedisEphemeralStore:
    """Entries in memory and in Redis (:class:`stoker_gcs.ephemeral.protocol.EphemeralStore`)."""

    kind = "redis"

    def __init__(self, url: str, now: Callable[[], float] = time.time) -> None:
        self._memory = MemoryEphemeralStore(now)
        self._now = now
        self._client = redis_client.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        # A subscription waits for as long as nothing happens; its health check finds a dead server.
        self._listener = redis_client.Redis.from_url(url, socket_connect_timeout=TIMEOUT_S)
        self._dirty: dict[tuple[str, str], Entry | None] = {}
        self._announced = 0
        self._mark = f"stoker:filled:{uuid.uuid4().hex}"
        self._wake = asyncio.Event()
        self._background = Background("gcs-redis")
        self.degraded = True
        self.subscribed = False
        self.round_trips = 0
        self.failures = 0

    @property
    def shared(self) -> bool:
        """Whether Redis answers."""
        return not self.degraded

    async def start(self, on_announce: Callable[[int], None]) -> None:
        """Start writing and listening, without a wait for Redis."""
        self._background.spawn(self._write(), name="write")
        self._background.spawn(self._listen(on_announce), name="listen")

    async def stop(self) -> None:
        """Close the connections."""
        await self._background.close()
        await self._client.aclose()
        await self._listener.aclose()

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` for ``ttl_s`` seconds."""
        self._memory.put(kind, key, value, ttl_s)
        self._dirty[kind, key] = (value, self._now() + ttl_s)
        self._wake.set()

    def remove(self, kind: str, key: str) -> None:
        """Delete an entry."""
        self._memory.remove(kind, key)
        self._dirty[kind, key] = None
        self._wake.set()

    def announce(self, seq: int) -> None:
        """Announce to the other replicas that events up to ``seq`` are committed."""
        self._announced = max(self._announced, seq)
        self._wake.set()

    async def all(self, kind: str) -> dict[str, bytes]:
        """Return entries in Redis and in memory; where both have one, that with the later expiry."""
        entries = dict(self._memory.live(kind))
        if not self.degraded:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    stored = await self._client.hgetall(_hash(kind))
            except _GONE as error:
                self._degrade(error)
                stored = {}
            now = self._now()
            for raw_key, raw in stored.items():
                key = raw_key.decode() if isinstance(raw_key, bytes) else raw_key
                if not isinstance(raw, bytes):
                    continue
                until = _EXPIRY.unpack_from(raw)[0]
                if until > now and (key not in entries or until > entries[key][1]):
                    entries[key] = (raw[_EXPIRY.size :], until)
        return {key: value for key, (value, _) in entries.items()}

    async def _write(self) -> None:
        sent = 0
        while True:
            if not self.degraded:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_EVERY_S):
                        await self._wake.wait()
                await asyncio.sleep(WRITE_EVERY_S)
            self._wake.clear()
            if self.degraded:
                self._mark_all_dirty()
            dirty, self._dirty = self._dirty, {}
            announced = self._announced
            try:
                async with asyncio.timeout(2 * TIMEOUT_S):
                    lost = await self._send(dirty, announced if announced > sent else 0)
            except _GONE as error:
                self._degrade(error)
                self._dirty = {**dirty, **self._dirty}
                await asyncio.sleep(RETRY_S)
                continue
            sent = announced
            self.round_trips += 1
            if lost and not self.degraded:
                _log.info("Redis was emptied: it gets all entries again")
                self._mark_all_dirty()
                self._wake.set()
            if self.degraded:
                self.degraded = False
                _log.info("Redis answers: the ephemeral store is shared again")

    def _mark_all_dirty(self) -> None:
        for kind in self._memory.kinds():
            for key, entry in self._memory.live(kind):
                self._dirty.setdefault((kind, key), entry)

    async def _send(self, dirty: dict[tuple[str, str], Entry | None], announced: int) -> bool:
        """Send entries; return whether Redis no longer has what was sent before."""
        pipe = self._client.pipeline(transaction=False)
        for (kind, key), entry in dirty.items():
            if entry is None:
                pipe.hdel(_hash(kind), key)
            else:
                pipe.hset(_hash(kind), key, _EXPIRY.pack(entry[1]) + entry[0])
        for kind in {kind for kind, _ in dirty}:
            pipe.expire(_hash(kind), HASH_TTL_S)
        if announced:
            pipe.publish(CHANNEL, str(announced))
        pipe.set(self._mark, b"", nx=True, ex=HASH_TTL_S)
        return bool((await pipe.execute())[-1])

    async def _listen(self, on_announce: Callable[[int], None]) -> None:
        while True:
            with contextlib.suppress(*_GONE):
                async with self._listener.pubsub() as pubsub:
                    await pubsub.subscribe(CHANNEL)
                    # Announcements before the subscription were missed: read SQL once.
                    on_announce(sys.maxsize)
                    self.subscribed = True
                    while True:
                        message = await pubsub.get_message(
                            ignore_subscribe_messages=True, timeout=5.0
                        )
                        if message is not None:
                            on_announce(int(message["data"]))
            self.subscribed = False
            await asyncio.sleep(RETRY_S)

    def _degrade(self, error: BaseException) -> None:
        self.failures += 1
        if not self.degraded:
            _log.warning("Redis does not answer (%s): going on from memory and SQL", error)
        self.degraded = True


def _hash(kind: str) -> str:
    return f"stoker:ephemeral:{kind}"
