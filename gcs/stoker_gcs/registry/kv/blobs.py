"""Blobs: functions and packages, named by content, written once and never changed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from functools import partial
from typing import TYPE_CHECKING

from stoker_gcs.registry.kv.quota import Quota
from stoker_gcs.state import schema
from stoker_gcs.state.records import MAX_TRIES
from stoker_gcs.store.changes import Change, Delete, Insert, Update, WriteConflict
from stoker_wire.data.piece_lists import may_be_list, read_list
from stoker_wire.errors import BadRequestError, ConflictError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Value
    from stoker_wire.settings import Settings

FUNCTIONS, PACKAGES = "function", "package"
_LARGE = 1 << 20
"""The SHA-256 of more takes milliseconds, which the event loop does not spend."""
_SHOWN = 100


def _sha256(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


class Blobs:
    """Content that never changes, by kind and id. What is in use is recorded every ``use_step_s``."""

    def __init__(self, state: StateStore, settings: Settings, use_step_s: float) -> None:
        self._state = state
        self._quota = Quota(
            state,
            schema.BLOBS,
            "kind",
            max_count=settings.blobs_max_count,
            max_bytes=settings.blobs_max_bytes,
            fix="those that nothing uses leave after STOKER_KEEP_BLOBS_S; or raise "
            "STOKER_BLOBS_MAX_BYTES or STOKER_BLOBS_MAX_COUNT",
        )
        self._use_step_s = use_step_s

    async def put(self, kind: str, blob_id: str, value: bytes) -> None:
        """Store a blob under its SHA-256; one that exists stays."""
        digest = await asyncio.to_thread(_sha256, value) if len(value) > _LARGE else _sha256(value)
        if digest != blob_id:
            raise BadRequestError(
                f"the {kind} is not what it is named by\n"
                f"its SHA-256 is {digest}, its name says {blob_id[:_SHOWN]}",
                field="hash",
            )
        held = partial(self.size, kind, blob_id)
        await self._quota.admit(f"the store of {kind}s", kind, len(value), held)
        row: dict[str, Value] = {
            "kind": kind,
            "blob_id": blob_id,
            "nbytes": len(value),
            "created_at_s": self._state.now(),
            "value": value,
        }
        use: dict[str, Value] = {
            "kind": kind,
            "blob_id": blob_id,
            "used_at_s": self._state.now(),
        }
        pieces = read_list(value) if kind == PACKAGES else ()
        uses = self._uses(kind, set(pieces))  # So that a list is not there without its pieces.
        add = Change((*uses, Insert(schema.BLOBS, row), Insert(schema.BLOB_USES, use)))
        for _ in range(MAX_TRIES):
            try:
                await self._state.writer.apply(add)
            except WriteConflict:
                await self._check_pieces(kind, pieces)
                # Its retention may have deleted it meanwhile.
                if not await self._touch(kind, blob_id):
                    continue
            return
        raise ConflictError(f"the {kind} is changed by too many at once\n{blob_id}: try again")

    async def _touch(self, kind: str, blob_id: str) -> bool:
        """Record that a blob is in use; False if it is gone."""
        key: dict[str, str | int] = {"kind": kind, "blob_id": blob_id}
        use = await self._state.store.get(schema.BLOB_USES, key)
        if use is None:
            return False
        now = self._state.now()
        if now - use["used_at_s"] < self._use_step_s:
            return True
        return await self._record_use(kind, {blob_id})

    async def _record_use(self, kind: str, blob_ids: set[str]) -> bool:
        """Record the use of blobs, and of the pieces of lists in the same transaction; False if one is gone.

        So a piece is never used less recently than a list that has it, and does not leave before it.
        """
        used = blob_ids.union(*[await self.pieces(kind, one) for one in blob_ids])
        try:
            await self._state.writer.apply(Change(self._uses(kind, used)))
        except WriteConflict:
            return False
        return True

    def _uses(self, kind: str, blob_ids: set[str]) -> tuple[Update, ...]:
        now = self._state.now()
        keys = ({"kind": kind, "blob_id": one} for one in sorted(blob_ids))
        return tuple(Update(schema.BLOB_USES, key, {"used_at_s": now}) for key in keys)

    async def pieces(self, kind: str, blob_id: str) -> tuple[str, ...]:
        """Return the pieces of a package that is a list of them; none of any other blob."""
        if kind != PACKAGES:
            return ()
        where: dict[str, Condition] = {"kind": kind, "blob_id": blob_id}
        rows = await self._state.store.select(schema.BLOBS, where, limit=1, columns=("nbytes",))
        if not rows or not may_be_list(rows[0]["nbytes"]):
            return ()
        row = await self._state.store.get(schema.BLOBS, {"kind": kind, "blob_id": blob_id})
        return () if row is None else read_list(bytes(row["value"]))

    async def _check_pieces(self, kind: str, pieces: tuple[str, ...]) -> None:
        if missing := pieces and await self.missing(kind, pieces):
            raise BadRequestError(
                f"{len(missing)} of the {len(pieces)} pieces of this package are not stored\n"
                f"put them first: the first is {missing[0]}",
                field="body",
            )

    async def missing(self, kind: str, blob_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these blobs that are not stored. From here on the others are in use."""
        where: dict[str, Condition] = {"kind": kind, "blob_id": tuple(set(blob_ids))}
        for _ in range(MAX_TRIES):
            rows = await self._state.store.select(schema.BLOB_USES, where, limit=len(blob_ids))
            before_s = self._state.now() - self._use_step_s
            old = {row["blob_id"] for row in rows if row["used_at_s"] <= before_s}
            if not old or await self._record_use(kind, old):
                there = {row["blob_id"] for row in rows}
                return tuple(one for one in blob_ids if one not in there)
        raise ConflictError(f"the {kind}s are changed by too many at once\ntry again")

    async def delete(self, kind: str, blob_id: str, *, used_at_s: float) -> bool:
        """Delete a blob unless it was used after ``used_at_s``."""
        key: dict[str, Condition] = {"kind": kind, "blob_id": blob_id}
        unused = Delete(schema.BLOB_USES, {**key, "used_at_s": used_at_s}, must_exist=True)
        try:
            await self._state.writer.apply(Change((unused, Delete(schema.BLOBS, key))))
        except WriteConflict:
            return False
        return True

    async def get(self, kind: str, blob_id: str) -> bytes:
        """Return a blob; NotFoundError if it was never put, or was not used for too long."""
        row = await self._state.store.get(schema.BLOBS, {"kind": kind, "blob_id": blob_id})
        if row is None:
            raise NotFoundError(
                f"there is no such {kind}\n{blob_id!r} was never put, or left by retention"
            )
        with contextlib.suppress(UnavailableError):  # The next use is recorded.
            await self._touch(kind, blob_id)
        return bytes(row["value"])

    async def size(self, kind: str, blob_id: str) -> int | None:
        """Return the size of a blob in bytes, or None if there is none."""
        where: dict[str, Condition] = {"kind": kind, "blob_id": blob_id}
        rows = await self._state.store.select(schema.BLOBS, where, limit=1, columns=("nbytes",))
        # Who asks will not put it again, so from here on it is in use.
        if not rows or not await self._touch(kind, blob_id):
            return None
        return int(rows[0]["nbytes"])
