"""Hot facts that must reach the other replicas even when no hot store is shared.

Wraps a hot store. While that one is shared (Redis answers) this adds nothing. While it is not, and
several replicas may write the same SQL, facts go to a table there about twice a second: slower and
dearer, but no replica takes the silence of Redis for the death of nodes and drivers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, Upsert
from stoker_wire.errors import StokerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_gcs.ephemeral.protocol import HotStore
    from stoker_gcs.store.changes import Value
    from stoker_gcs.store.journal import Journal
    from stoker_gcs.store.protocol import Store

_log = logging.getLogger("stoker.gcs.hot")
SAVE_EVERY_S = 0.5


class FallbackHot:
    """See :class:`stoker_gcs.ephemeral.protocol.HotStore`."""

    def __init__(self, inner: HotStore, store: Store, journal: Journal) -> None:
        self._inner = inner
        self._store = store
        self._journal = journal
        self._mine: dict[tuple[str, str], tuple[bytes, float] | None] = {}
        self._unsaved: set[tuple[str, str]] = set()

    @property
    def shared(self) -> bool:
        """Whether other replicas see what is put here, by whichever way."""
        return self._inner.shared or self._store.shared

    @property
    def degraded(self) -> bool:
        """Whether a configured server does not answer."""
        return self._inner.degraded

    @property
    def hears(self) -> bool:
        """Whether what other replicas announce arrives here, right now."""
        return self._inner.hears

    async def start(self, on_news: Callable[[int], None]) -> None:
        """Begin."""
        await self._inner.start(on_news)

    async def stop(self) -> None:
        """End."""
        await self._inner.stop()

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Keep ``value`` for ``ttl_s`` seconds."""
        self._inner.put(kind, key, value, ttl_s)
        if self._store.shared:
            self._mine[kind, key] = (value, time.time() + ttl_s)
            self._unsaved.add((kind, key))

    def remove(self, kind: str, key: str) -> None:
        """Forget a fact."""
        self._inner.remove(kind, key)
        if self._store.shared:
            self._mine[kind, key] = None
            self._unsaved.add((kind, key))

    def announce(self, seq: int) -> None:
        """Tell the other replicas that events up to ``seq`` are committed."""
        self._inner.announce(seq)

    async def all(self, kind: str) -> dict[str, bytes]:
        """All facts of a kind that have not expired."""
        facts = await self._inner.all(kind)
        if self._inner.shared or not self._store.shared:
            return facts
        now = time.time()
        for row in await self._store.select(schema.FACTS, {"kind": kind}, limit=100_000):
            own = self._mine.get((kind, row["key"]))
            if row["expires_at_s"] > now and own is None:
                facts.setdefault(row["key"], row["value"])
            elif row["expires_at_s"] > now and own is not None and row["expires_at_s"] > own[1]:
                facts[row["key"]] = row["value"]
        return facts

    async def save(self) -> None:
        """Write to SQL what only this process knows, forever; for shared stores."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            if self._inner.shared:
                continue
            unsaved, self._unsaved = self._unsaved, set()
            try:
                await self._save(unsaved)
            except StokerError as error:
                self._unsaved |= unsaved
                _log.warning("hot facts did not reach SQL: %s", error)

    async def _save(self, unsaved: set[tuple[str, str]]) -> None:
        now = time.time()
        operations: list[Upsert | Delete] = []
        for kind, key in sorted(unsaved):
            fact = self._mine.get((kind, key))
            if fact is None or fact[1] <= now:
                self._mine.pop((kind, key), None)
                operations.append(Delete(schema.FACTS, {"kind": kind, "key": key}))
                continue
            row: dict[str, Value] = {
                "kind": kind,
                "key": key,
                "value": fact[0],
                "expires_at_s": fact[1],
            }
            operations.append(Upsert(schema.FACTS, row))
        if operations:
            await self._journal.apply(Change(tuple(operations)))
