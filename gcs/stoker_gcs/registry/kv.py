"""The key-value store: small raw values by namespace and key, for rendezvous and user code.

Functions and packages are stored beside it as blobs named by content, written once and never changed.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, Insert, Prefix, Upsert, WriteConflict
from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.messages.control import KvEntry, ListQuery, Page
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Value

FUNCTIONS, PACKAGES = "function", "package"
_SHA256_HEX = 64


class KeyValues:
    """Values by namespace and key. The subject of a key's events is ``namespace/key``."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    async def put(
        self, namespace: str, key: str, value: bytes, *, if_absent: bool
    ) -> KvEntry | None:
        """Set a key; with ``if_absent``, return None and change nothing if it exists."""
        entry = KvEntry(namespace=namespace, key=key, nbytes=len(value), seq=0)
        event = self._state.event(EventKind.KV_CHANGED, f"{namespace}/{key}", entry)
        row: dict[str, Value] = {
            "namespace": namespace,
            "key": key,
            "nbytes": len(value),
            "seq": self._state.log.last + 1,
            "value": value,
        }
        write = Insert(schema.KV, row) if if_absent else Upsert(schema.KV, row)
        try:
            events = await self._state.writer.apply(Change((write,), (event,)))
        except WriteConflict:
            return None
        return msgspec.structs.replace(entry, seq=events[0].seq)

    async def get(self, namespace: str, key: str, wait_s: float) -> bytes:
        """Return a value; wait up to ``wait_s`` for the key to exist, then raise NotFoundError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with self._state.log.signal(f"{namespace}/{key}") as signal:
            while True:
                signal.clear()
                row = await self._state.store.get(schema.KV, {"namespace": namespace, "key": key})
                if row is not None:
                    return bytes(row["value"])
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise NotFoundError(f"there is no key {key!r} in namespace {namespace!r}")
                try:
                    await asyncio.wait_for(signal.wait(), left_s)
                except TimeoutError:
                    continue

    async def delete(self, namespace: str, key: str) -> bool:
        """Remove a key; return False if it did not exist."""
        payload = {"namespace": namespace, "key": key, "deleted": True}
        event = self._state.event(EventKind.KV_CHANGED, f"{namespace}/{key}", payload)
        remove = Delete(schema.KV, {"namespace": namespace, "key": key}, must_exist=True)
        try:
            await self._state.writer.apply(Change((remove,), (event,)))
        except WriteConflict:
            return False
        return True

    async def page(self, namespace: str, prefix: str, query: ListQuery) -> Page[KvEntry]:
        """Return a page of the keys of a namespace that start with ``prefix``."""
        where: dict[str, Condition] = {"namespace": namespace}
        if prefix:
            where["key"] = Prefix(prefix)
        rows, cursor = await self._state.rows(schema.KV, query, where)
        items = tuple(
            KvEntry(namespace=namespace, key=row["key"], nbytes=row["nbytes"], seq=row["seq"])
            for row in rows
        )
        return Page(items=items, next_cursor=cursor, seq=self._state.log.last)


class Blobs:
    """Content that never changes, by kind and id."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    async def put(self, kind: str, blob_id: str, value: bytes) -> None:
        """Store a blob; one that exists stays. A package must have the hash in its name."""
        if kind == PACKAGES:
            digest = hashlib.sha256(value).hexdigest()
            expected = blob_id.rpartition("_")[2].removesuffix(".zip")
            if len(expected) < 16 or not digest.startswith(expected[:_SHA256_HEX]):
                raise BadRequestError(
                    "the package is not what it is named by\n"
                    f"its SHA-256 is {digest}, its name says {expected}",
                    field="hash",
                )
        row: dict[str, Value] = {
            "kind": kind,
            "blob_id": blob_id,
            "nbytes": len(value),
            "created_at_s": self._state.now(),
            "value": value,
        }
        try:
            await self._state.writer.apply(Change((Insert(schema.BLOBS, row),)))
        except WriteConflict:
            return

    async def get(self, kind: str, blob_id: str) -> bytes:
        """Return a blob; NotFoundError if it was never put."""
        row = await self._state.store.get(schema.BLOBS, {"kind": kind, "blob_id": blob_id})
        if row is None:
            raise NotFoundError(f"there is no such {kind}\n{blob_id!r} was never put")
        return bytes(row["value"])

    async def size(self, kind: str, blob_id: str) -> int | None:
        """Return the size of a blob in bytes, or None if there is none."""
        where: dict[str, Condition] = {"kind": kind, "blob_id": blob_id}
        rows = await self._state.store.select(schema.BLOBS, where, limit=1, columns=("nbytes",))
        return int(rows[0]["nbytes"]) if rows else None
