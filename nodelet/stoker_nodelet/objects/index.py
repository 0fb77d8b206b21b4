"""The index of the objects that are in this node's arena or were spilled from it.

Runtimes write, read and free the files themselves; the nodelet knows which exist and whom they
belong to, and frees those that remain: when the owner is on another node or gone, when the job has
finished. Room is made by :mod:`stoker_nodelet.objects.eviction`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from stoker_wire.arena import Arena
from stoker_wire.arena.extents import SPILL
from stoker_wire.errors import NotFoundError
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.objects import ObjectInfo


@dataclass(slots=True)
class ObjectIndex:
    """Object id -> its entry, the oldest first. ``nbytes`` is the sum of those in memory."""

    arena: Arena
    node_id: str
    nbytes: int = 0
    spilled_bytes: int = 0
    has_ended: Callable[[ObjectInfo], bool] = lambda one: False
    """Whether nobody can want an object any more: it is freed as it is reported, or has arrived."""
    _index: dict[str, ObjectInfo] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._index

    def seal(self, objects: Iterable[ObjectInfo]) -> None:
        """Add objects to the index; those that their owner has freed by now are skipped.

        A known id was written again, by another attempt at its task.
        """
        for one in objects:
            object_id = check_id(one.object_id, Prefix.OBJECT, field="objects.object_id")
            if not self._has_file(one):
                continue
            self._remove(object_id, keep_file=one.spilled)
            self._index[object_id] = msgspec.structs.replace(
                one, node_id=self.node_id, created_at_s=time.time()
            )
            if one.spilled:
                self.spilled_bytes += one.nbytes
            else:
                self.nbytes += one.nbytes
            if self.has_ended(one):
                self.free([object_id])

    def free(self, object_ids: Iterable[str]) -> int:
        """Free objects; unknown ids are skipped. Return how many were known."""
        count = 0
        for object_id in object_ids:
            check_id(object_id, Prefix.OBJECT, field="object_ids")
            known = self._remove(object_id)
            here = self.arena.recycle(object_id)  # the owner, if on this machine, has done it
            count += known or here
        return count

    def adopt(self, object_ids: Iterable[str]) -> tuple[ObjectInfo, ...]:
        """Become the home of those that are here, as copies or already; return them."""
        adopted = []
        for object_id in object_ids:
            one = self._index.get(check_id(object_id, Prefix.OBJECT, field="object_ids"))
            if one is not None:
                self._index[object_id] = one = msgspec.structs.replace(one, copy_of="")
                adopted.append(one)
        return tuple(adopted)

    def _remove(self, object_id: str, *, keep_file: bool = False) -> bool:
        """Remove an object from the index, and from the disk; return whether it was known."""
        known = self._index.pop(object_id, None)
        if known is None:
            return False
        if known.spilled:
            self.spilled_bytes -= known.nbytes
            if not keep_file:
                self.arena.drop_from_disk(object_id)
        else:
            self.nbytes -= known.nbytes
        return True

    def homes(self) -> list[ObjectInfo]:
        """Return the objects whose home is here: those that are no copies, and that no owner has freed."""
        return [one for one in self._index.values() if not one.copy_of and self._has_file(one)]

    def _has_file(self, one: ObjectInfo) -> bool:
        folder = self.arena.path / SPILL if one.spilled else self.arena.path
        return (folder / one.object_id).exists()

    def free_job(self, job_id: str, *, keep_owners: set[str]) -> int:
        """Free the job's objects, except those of owners that live on (detached actors)."""
        return self.free(
            [
                one.object_id
                for one in self._index.values()
                if one.job_id == job_id and one.owner_id not in keep_owners
            ]
        )

    def of_owner(self, owner_id: str) -> list[ObjectInfo]:
        """Return the objects of an owner."""
        return [one for one in self._index.values() if one.owner_id == owner_id]

    def free_owner(self, owner_id: str) -> int:
        """Free the objects of an owner that is gone."""
        return self.free([one.object_id for one in self.of_owner(owner_id)])

    def get(self, object_id: str) -> ObjectInfo:
        """Return the entry of an object."""
        try:
            return self._index[object_id]
        except KeyError:
            raise NotFoundError(f"{object_id} is not on {self.node_id}") from None

    def made_at_s(self, object_id: str) -> float:
        """Return when an object was reported; 0 for one that is not known."""
        one = self._index.get(object_id)
        return one.created_at_s if one is not None else 0.0

    def job_ids(self) -> set[str]:
        """Return the jobs that have objects here."""
        return {one.job_id for one in self._index.values()}

    def in_memory(self) -> Iterator[ObjectInfo]:
        """Iterate over the objects that are not spilled, the oldest first."""
        return (one for one in list(self._index.values()) if not one.spilled)

    def mark_spilled(self, one: ObjectInfo) -> bool:
        """Record that an object is on disk; False if it was freed or written again meanwhile."""
        if self._index.get(one.object_id) is not one:
            return False
        self._index[one.object_id] = msgspec.structs.replace(one, spilled=True)
        self.nbytes -= one.nbytes
        self.spilled_bytes += one.nbytes
        return True

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
        """Return the largest objects in memory, for the error of a full arena."""
        ranked = sorted(self.in_memory(), key=lambda one: (-one.nbytes, one.object_id))
        return tuple(ranked[:count])
