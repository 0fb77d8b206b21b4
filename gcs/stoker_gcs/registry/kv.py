"""The key-value store: small raw values by namespace and key, for rendezvous and user code.

Functions and packages are kept beside it as blobs named by content, written once and never changed.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Clash, Delete, Insert, Prefix, Upsert
from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.messages.control import KvEntry, ListQuery, Page

if TYPE_CHECKING:
    from stoker_gcs.state.records import Truth
    from stoker_gcs.store.changes import Condition, Value

FUNCTIONS, PACKAGES = "function", "package"
_SHA256_HEX = 64


class KeyValues:
    """See the module. The subject of a key's events is ``namespace/key``."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    async def put(
        self, namespace: str, key: str, value: bytes, *, if_absent: bool
    ) -> KvEntry | None:
        """Set a key; with ``if_absent``, None (and no change) if it is there."""
        entry = KvEntry(namespace=namespace, key=key, nbytes=len(value), seq=0)
        event = self._truth.event("kv.changed", f"{namespace}/{key}", entry)
        row: dict[str, Value] = {
            "namespace": namespace,
            "key": key,
            "nbytes": len(value),
            "seq": self._truth.log.last + 1,
            "value": value,
        }
        write = Insert(schema.KV, row) if if_absent else Upsert(schema.KV, row)
        try:
            events = await self._truth.journal.apply(Change((write,), (event,)))
        except Clash:
            return None
        return msgspec.structs.replace(entry, seq=events[0].seq)

    async def get(self, namespace: str, key: str, wait_s: float) -> bytes:
        """A value; waits up to ``wait_s`` for the key to exist, then NotFoundError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with self._truth.log.signal(f"{namespace}/{key}") as signal:
            while True:
                signal.clear()
                row = await self._truth.store.get(schema.KV, {"namespace": namespace, "key": key})
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
        """Remove a key; False if it was not there."""
        payload = {"namespace": namespace, "key": key, "deleted": True}
        event = self._truth.event("kv.changed", f"{namespace}/{key}", payload)
        remove = Delete(schema.KV, {"namespace": namespace, "key": key}, must_exist=True)
        try:
            await self._truth.journal.apply(Change((remove,), (event,)))
        except Clash:
            return False
        return True

    async def page(self, namespace: str, prefix: str, query: ListQuery) -> Page[KvEntry]:
        """Keys of a namespace that start with ``prefix``."""
        where: dict[str, Condition] = {"namespace": namespace}
        if prefix:
            where["key"] = Prefix(prefix)
        rows, cursor = await self._truth.rows(schema.KV, query, where)
        items = tuple(
            KvEntry(namespace=namespace, key=row["key"], nbytes=row["nbytes"], seq=row["seq"])
            for row in rows
        )
        return Page(items=items, next_cursor=cursor, seq=self._truth.log.last)


class Blobs:
    """Content that never changes, by kind and id."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    async def put(self, kind: str, blob_id: str, value: bytes) -> None:
        """Keep a blob. The same again is nothing new; a package must have the hash it is named by."""
        if kind == PACKAGES:
            found = hashlib.sha256(value).hexdigest()
            named = blob_id.rpartition("_")[2].removesuffix(".zip")
            if len(named) < 16 or not found.startswith(named[:_SHA256_HEX]):
                raise BadRequestError(
                    "the package is not what it is named by\n"
                    f"its SHA-256 is {found}, its name says {named}",
                    field="hash",
                )
        row: dict[str, Value] = {
            "kind": kind,
            "blob_id": blob_id,
            "nbytes": len(value),
            "created_at_s": self._truth.now(),
            "value": value,
        }
        try:
            await self._truth.journal.apply(Change((Insert(schema.BLOBS, row),)))
        except Clash:
            return

    async def get(self, kind: str, blob_id: str) -> bytes:
        """A blob; NotFoundError if it was never put."""
        row = await self._truth.store.get(schema.BLOBS, {"kind": kind, "blob_id": blob_id})
        if row is None:
            raise NotFoundError(f"there is no such {kind}\n{blob_id!r} was never put")
        return bytes(row["value"])

    async def exists(self, kind: str, blob_id: str) -> int | None:
        """The size of a blob, or None."""
        where: dict[str, Condition] = {"kind": kind, "blob_id": blob_id}
        rows = await self._truth.store.select(schema.BLOBS, where, limit=1, columns=("nbytes",))
        return int(rows[0]["nbytes"]) if rows else None
