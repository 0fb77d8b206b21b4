"""The index of objects that runtimes have sealed in the arena; their bytes are opaque to the nodelet.

Runtimes write and read the files themselves; the nodelet only knows which exist, whom they belong
to, and deletes them: when freed, when their owner is gone, when their job has finished.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.work import ObjectInfo

_FREED_EARLY = 100_000


@dataclass(slots=True)
class Objects:
    """Object id -> what is known of it. ``nbytes`` is the sum of all."""

    arena_dir: Path
    node_id: str
    nbytes: int = 0
    _index: dict[str, ObjectInfo] = field(default_factory=dict)
    _freed_early: dict[str, None] = field(default_factory=dict)
    """Freed by their owner before the process that wrote them had sealed them; oldest first."""

    def __len__(self) -> int:
        return len(self._index)

    def seal(self, objects: Iterable[ObjectInfo]) -> None:
        """Take objects into the index; one that is sealed again stays as it was."""
        for one in objects:
            object_id = check_id(one.object_id, Prefix.OBJECT, field="objects.object_id")
            if object_id in self._index:
                continue
            if object_id in self._freed_early:
                del self._freed_early[object_id]
                continue
            try:
                nbytes = (self.arena_dir / object_id).stat().st_size
            except FileNotFoundError:
                raise BadRequestError(
                    f"{object_id} is not in the arena: write {object_id}.tmp, rename it, then seal",
                    field="objects.object_id",
                ) from None
            self._index[object_id] = msgspec.structs.replace(
                one, nbytes=nbytes, node_id=self.node_id, created_at_s=time.time()
            )
            self.nbytes += nbytes

    def free(self, object_ids: Iterable[str]) -> int:
        """Delete objects; ids that are unknown here are passed over. Return how many went.

        A free may overtake the seal, which another process sends: the file goes now, and the seal
        that comes later is passed over.
        """
        count = 0
        for object_id in object_ids:
            known = self._index.pop(object_id, None)
            if known is not None:
                self.nbytes -= known.nbytes
            with contextlib.suppress(FileNotFoundError):
                (self.arena_dir / check_id(object_id, Prefix.OBJECT, field="object_ids")).unlink()
                count += 1
                if known is None:
                    self._freed_early[object_id] = None
        while len(self._freed_early) > _FREED_EARLY:
            del self._freed_early[next(iter(self._freed_early))]
        return count

    def free_job(self, job_id: str, *, keep_owners: set[str]) -> int:
        """Delete the job's objects, except those of owners that live on (detached actors)."""
        return self.free(
            [
                one.object_id
                for one in self._index.values()
                if one.job_id == job_id and one.owner_id not in keep_owners
            ]
        )

    def free_owner(self, owner_id: str) -> int:
        """Delete what an owner that is gone has left."""
        return self.free([o.object_id for o in self._index.values() if o.owner_id == owner_id])

    def get(self, object_id: str) -> ObjectInfo:
        """Return what is known of an object."""
        try:
            return self._index[object_id]
        except KeyError:
            raise NotFoundError(f"{object_id} is not on {self.node_id}") from None

    def path(self, object_id: str) -> Path:
        """Return the file that holds an object's bytes."""
        return self.arena_dir / self.get(object_id).object_id

    def page(self, cursor: str, limit: int, *, job_id: str, owner_id: str) -> list[ObjectInfo]:
        """Return up to ``limit`` objects with ids behind ``cursor``, in order of their ids."""
        chosen = sorted(
            (
                one
                for one in self._index.values()
                if one.object_id > cursor
                and job_id in ("", one.job_id)
                and owner_id in ("", one.owner_id)
            ),
            key=lambda one: one.object_id,
        )
        return chosen[:limit]

    def largest(self, count: int) -> tuple[ObjectInfo, ...]:
        """Return the largest objects, for the error of a full arena."""
        ranked = sorted(self._index.values(), key=lambda one: (-one.nbytes, one.object_id))
        return tuple(ranked[:count])

    def free_bytes(self, limit_bytes: int) -> int:
        """Return what can still be written: the file system's rest, or the limit's if less."""
        status = os.statvfs(self.arena_dir)
        return max(0, min(status.f_bavail * status.f_frsize, limit_bytes - self.nbytes))
