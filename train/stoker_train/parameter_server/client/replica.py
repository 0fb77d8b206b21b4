"""The rows that a worker in mode GEO trains by itself, and their difference to those of the servers.

Its optimizer steps them at once; every so many steps what they moved by goes to the servers, divided by the
number of workers, which add it up and answer with their rows (GEO-SGD). No messages here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_train.parameter_server.server.messages import Part
from stoker_train.parameter_server.storage.dense import DenseShard
from stoker_train.parameter_server.storage.sparse import SparseShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stoker_train.parameter_server.storage.spec import TableSpec

    Keys = NDArray[np.int64]


class SparseReplica:
    """Rows of a sparse table: those that this worker has used."""

    def __init__(self, spec: TableSpec) -> None:
        self._shard = SparseShard(spec)
        self._base = np.empty((0, spec.width), spec.dtype)
        self._round = 1
        self._read_at = np.empty(0, np.int64)
        """The round in which a row was last read from the servers; 0: not yet."""
        self._is_touched = np.empty(0, bool)

    def pull(self, keys: Keys, fetch: Callable[[Keys], NDArray[Any]]) -> NDArray[Any]:
        """Return rows of keys that are there once each; ``fetch`` reads those that are not of this round."""
        slots = self._slots(keys)
        is_old = self._read_at[slots] < self._round
        if is_old.any():
            old, at = keys[is_old], slots[is_old]
            rows = fetch(old)
            self._shard.assign(old, rows)
            self._base[at], self._read_at[at] = rows, self._round
        return self._shard.pull(keys)

    def push(self, part: Part, fetch: Callable[[Keys], NDArray[Any]]) -> None:
        """Have the optimizer step rows here."""
        assert part.keys is not None
        self.pull(part.keys, fetch)
        self._shard.push(part.keys, part.values)
        self._is_touched[self._shard.find(part.keys)] = True

    def delta(self, workers: int) -> Part | None:
        """Return by how much rows moved since they were read, over the number of workers."""
        self._keys = self._touched_keys()
        if not self._keys.size:
            return None
        self._sent = self._shard.pull(self._keys)
        moved = self._sent - self._base[self._shard.find(self._keys)]
        moved /= workers
        return Part(self._shard.spec, self._keys, moved)

    def settle(self, rows: NDArray[Any] | None) -> None:
        """Go on from the rows that servers have after the delta; others are read again when they are used.

        What rows moved by since the delta, whose answer may be late, stays: it is part of the next one.
        """
        self._round += 1
        if rows is None:
            return
        slots = self._shard.find(self._keys)
        since = self._shard.pull(self._keys) - self._sent
        self._shard.assign(self._keys, rows + since)
        self._base[slots], self._read_at[slots] = rows, self._round
        self._is_touched[slots] = since.any(axis=1)
        self._read_at[self._is_touched] = self._round

    def _touched_keys(self) -> Keys:
        exported: Keys = self._shard.keys[self._is_touched[: len(self._shard)]]
        return np.sort(exported)

    def _slots(self, keys: Keys) -> NDArray[np.int32]:
        slots = self._shard.slots(keys)
        room, has = self._shard.room, self._read_at.size
        if room > has:
            self._base = np.resize(self._base, (room, self._base.shape[1]))
            self._read_at = np.concatenate((self._read_at, np.zeros(room - has, np.int64)))
            self._is_touched = np.concatenate((self._is_touched, np.zeros(room - has, bool)))
        return slots


class DenseReplica:
    """All of a dense table."""

    def __init__(self, spec: TableSpec) -> None:
        self._shard = DenseShard(spec, 0, spec.size)
        self._base: NDArray[Any] | None = None

    def pull(self, fetch: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the flattened array; ``fetch`` reads it the first time."""
        if self._base is None:
            self._base = np.array(fetch())
            self._shard.assign(0, self._base)
        return self._shard.pull()

    def push(self, part: Part, fetch: Callable[[], NDArray[Any]]) -> None:
        """Have the optimizer step the array here."""
        self.pull(fetch)
        self._shard.push(0, part.values)

    def delta(self, workers: int) -> Part | None:
        """Return by how much the array moved since it was read, over the number of workers."""
        if self._base is None:
            return None
        self._sent = self._shard.pull()
        moved = (self._sent - self._base) / self._base.dtype.type(workers)
        return Part(self._shard.spec, np.array([0, moved.size]), moved)

    def settle(self, values: NDArray[Any] | None) -> None:
        """Go on from what servers have after the delta, and what the array moved by since."""
        if values is not None:
            self._base = values
            self._shard.assign(0, values + (self._shard.values - self._sent))
