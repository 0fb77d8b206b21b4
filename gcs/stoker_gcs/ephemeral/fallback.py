"""The fallback of an ephemeral store to SQL, for replicas that no Redis connects.

Wraps an ephemeral store. While that one is shared (Redis answers) this adds nothing. While it is not,
and several replicas may write the same SQL, entries go to a table there about twice a second: slower
and dearer, but no replica takes the silence of Redis for the death of nodes and drivers.
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

    from stoker_gcs.ephemeral.protocol import EphemeralStore
    from stoker_gcs.store.changes import Value
    from stoker_gcs.store.group_commit import GroupCommitWriter
    from stoker_gcs.store.protocol import Store

_log = logging.getLogger(__name__)
SAVE_EVERY_S = 0.5


class FallbackEphemeralStore:
    """An ephemeral store and its fallback (:class:`stoker_gcs.ephemeral.protocol.EphemeralStore`)."""

    def __init__(self, inner: EphemeralStore, store: Store, writer: GroupCommitWriter) -> None:
        self._inner = inner
        self._store = store
        self._writer = writer
        self._own: dict[tuple[str, str], tuple[bytes, float] | None] = {}
        self._unsaved: set[tuple[str, str]] = set()

    @property
    def kind(self) -> str:
        """The place in which the wrapped store has its entries."""
        return self._inner.kind

    @property
    def shared(self) -> bool:
        """Whether other replicas see what is put here, through Redis or SQL."""
        return self._inner.shared or self._store.shared

    @property
    def degraded(self) -> bool:
        """Whether a configured server does not answer."""
        return self._inner.degraded

    @property
    def subscribed(self) -> bool:
        """Whether announcements of other replicas arrive here, right now."""
        return self._inner.subscribed

    async def start(self, on_announce: Callable[[int], None]) -> None:
        """Start the wrapped store."""
        await self._inner.start(on_announce)

    async def stop(self) -> None:
        """Stop the wrapped store."""
        await self._inner.stop()

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` for ``ttl_s`` seconds."""
        self._inner.put(kind, key, value, ttl_s)
        if self._store.shared:
            self._own[kind, key] = (value, time.time() + ttl_s)
            self._unsaved.add((kind, key))

    def remove(self, kind: str, key: str) -> None:
        """Delete an entry."""
        self._inner.remove(kind, key)
        if self._store.shared:
            self._own[kind, key] = None
            self._unsaved.add((kind, key))

    def announce(self, seq: int) -> None:
        """Announce to the other replicas that events up to ``seq`` are committed."""
        self._inner.announce(seq)

    async def all(self, kind: str) -> dict[str, bytes]:
        """Return all entries of a kind that have not expired."""
        entries = await self._inner.all(kind)
        if self._inner.shared or not self._store.shared:
            return entries
        now = time.time()
        for row in await self._store.select(schema.FACTS, {"kind": kind}, limit=100_000):
            own = self._own.get((kind, row["key"]))
            if row["expires_at_s"] > now and own is None:
                entries.setdefault(row["key"], row["value"])
            elif row["expires_at_s"] > now and own is not None and row["expires_at_s"] > own[1]:
                entries[row["key"]] = row["value"]
        return entries

    async def save(self) -> None:
        """Write to SQL what only this process has, until cancelled; for shared stores."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            if self._inner.shared:
                continue
            unsaved, self._unsaved = self._unsaved, set()
            try:
                await self._save(unsaved)
            except StokerError as error:
                self._unsaved |= unsaved
                _log.warning("ephemeral entries did not reach SQL: %s", error)

    async def _save(self, unsaved: set[tuple[str, str]]) -> None:
        now = time.time()
        operations: list[Upsert | Delete] = []
        for kind, key in sorted(unsaved):
            entry = self._own.get((kind, key))
            if entry is None or entry[1] <= now:
                self._own.pop((kind, key), None)
                operations.append(Delete(schema.FACTS, {"kind": kind, "key": key}))
                continue
            row: dict[str, Value] = {
                "kind": kind,
                "key": key,
                "value": entry[0],
                "expires_at_s": entry[1],
            }
            operations.append(Upsert(schema.FACTS, row))
        if operations:
            await self._writer.apply(Change(tuple(operations)))
