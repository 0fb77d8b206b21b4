"""Replies by Idempotency-Key, so that a POST that is sent twice happens once.

Called by the HTTP server around each POST with such a key. Only successes are stored: a failed
request changed nothing and may run again. The store in memory is the default; the gcs may put one
over SQL in its place, so that a retry survives a restart.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import Protocol

import msgspec

from stoker_wire.errors import IdempotencyError

MAX_KEY_CHARACTERS = 255
"""Of an Idempotency-Key."""


class StoredReply(msgspec.Struct, frozen=True):
    """A finished reply, as it is sent again."""

    status: int
    content_type: str
    body: bytes


class IdempotencyStore(Protocol):
    """Storage of keys and replies. ``key`` already includes the caller and the path."""

    async def claim(self, key: str, fingerprint: bytes) -> StoredReply | None:
        """Return the reply stored under ``key``, or None: the caller now holds the key.

        If another request holds it, wait until that one ends. IdempotencyError if the key was used
        with another ``fingerprint``.
        """
        ...

    async def finish(self, key: str, fingerprint: bytes, reply: StoredReply) -> None:
        """Store ``reply`` and release the key."""
        ...

    async def abandon(self, key: str) -> None:
        """Release the key without a reply: the request failed, and may be tried again."""
        ...


def fingerprint(body: bytes) -> bytes:
    """Return a hash of a body (16 bytes)."""
    return blake2b(body, digest_size=16).digest()


class MemoryStore:
    """The most recent replies in memory, bounded by count and by bytes."""

    def __init__(self, max_replies: int = 10_000, max_nbytes: int = 64 * 1024 * 1024) -> None:
        self._max_replies = max_replies
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._done: OrderedDict[str, tuple[bytes, StoredReply]] = OrderedDict()
        self._running: dict[str, tuple[bytes, asyncio.Event]] = {}

    async def claim(self, key: str, fingerprint: bytes) -> StoredReply | None:
        """Return the stored reply, or None and hold the key; waits for a request that holds it."""
        while True:
            done = self._done.get(key)
            if done is not None:
                _check(done[0], fingerprint)
                self._done.move_to_end(key)
                return done[1]
            running = self._running.get(key)
            if running is None:
                self._running[key] = (fingerprint, asyncio.Event())
                return None
            _check(running[0], fingerprint)
            await running[1].wait()

    async def finish(self, key: str, fingerprint: bytes, reply: StoredReply) -> None:
        """Store ``reply``, drop the oldest beyond the bounds, and release the key."""
        self._done[key] = (fingerprint, reply)
        self._nbytes += len(reply.body)
        while len(self._done) > self._max_replies or self._nbytes > self._max_nbytes:
            _, (_, dropped) = self._done.popitem(last=False)
            self._nbytes -= len(dropped.body)
        await self.abandon(key)

    async def abandon(self, key: str) -> None:
        """Release the key without a reply."""
        running = self._running.pop(key, None)
        if running is not None:
            running[1].set()


def _check(stored: bytes, given: bytes) -> None:
    if stored != given:
        raise IdempotencyError(
            "this Idempotency-Key was used before with another body\n"
            "use a new key for a new request",
            field="Idempotency-Key",
        )
