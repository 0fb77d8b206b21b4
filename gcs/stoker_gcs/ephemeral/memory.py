"""The hot store of one process: dicts with expiry. Also what the Redis one falls back to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Fact = tuple[bytes, float]


class MemoryHot:
    """See :class:`stoker_gcs.ephemeral.protocol.HotStore`. ``now`` is injected by tests."""

    hears = False
    shared = False
    degraded = False

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._facts: dict[str, dict[str, Fact]] = {}

    async def start(self, on_news: Callable[[int], None]) -> None:
        """Nothing to connect to, and no other replica that could have news."""

    async def stop(self) -> None:
        """Nothing to close."""

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Keep ``value`` for ``ttl_s`` seconds."""
        self._facts.setdefault(kind, {})[key] = (value, self._now() + ttl_s)

    def remove(self, kind: str, key: str) -> None:
        """Forget a fact."""
        self._facts.get(kind, {}).pop(key, None)

    async def all(self, kind: str) -> dict[str, bytes]:
        """All facts of a kind that have not expired."""
        return {key: value for key, (value, _) in self.alive(kind)}

    def alive(self, kind: str) -> Iterator[tuple[str, Fact]]:
        """The facts of a kind with their expiry; expired ones are dropped."""
        facts, now = self._facts.get(kind, {}), self._now()
        for key in [key for key, (_, until) in facts.items() if until <= now]:
            del facts[key]
        return iter(list(facts.items()))

    def kinds(self) -> tuple[str, ...]:
        """The kinds that ever held a fact."""
        return tuple(self._facts)

    def announce(self, seq: int) -> None:
        """Nobody else listens."""
