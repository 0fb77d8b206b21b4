"""Blobs: functions and packages, named by content, written once and never changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Insert, WriteConflict
from stoker_wire.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Value

FUNCTIONS, PACKAGES = "function", "package"
_SHA256_HEX = 64


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
