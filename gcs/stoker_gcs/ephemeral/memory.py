"""The ephemeral store of one process: dicts with expiry. The one on Redis falls back to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Entry = tuple[bytes, float]


class MemoryEphemeralStore:
    """Entries in dicts (:class:`stoker_gcs.ephemeral.protocol.EphemeralStore`); tests inject ``now``."""

    kind = "memory"
    subscribed = False
    shared = False
    degraded = False

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: dict[str, dict[str, Entry]] = {}

    async def start(self, on_announce: Callable[[int], None]) -> None:
        """Do nothing: there is no server, and no other replica that could announce."""

    async def stop(self) -> None:
        """Do nothing: there is nothing to close."""

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` for ``ttl_s`` seconds."""
        self._entries.setdefault(kind, {})[key] = (value, self._now() + ttl_s)

    def remove(self, kind: str, key: str) -> None:
        """Delete an entry."""
        self._entries.get(kind, {}).pop(key, None)

    async def all(self, kind: str) -> dict[str, bytes]:
        """Return all entries of a kind that have not expired."""
        return {key: value for key, (value, _) in self.live(kind)}

    def live(self, kind: str) -> Iterator[tuple[str, Entry]]:
        """Return the entries of a kind with their expiry, and drop expired ones."""
        entries, now = self._entries.get(kind, {}), self._now()
        for key in [key for key, (_, until) in entries.items() if until <= now]:
            del entries[key]
        return iter(list(entries.items()))

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that ever had an entry."""
        return tuple(self._entries)

    def announce(self, seq: int) -> None:
        """Do nothing: there is no other replica."""
