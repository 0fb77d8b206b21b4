"""A server's rows of a sparse table, and the states of its optimizer beside them.

Rows lie in slots of growing arrays in the order in which they were made. Keys of one request are there once
each (:mod:`~stoker_train.parameter_server.storage.keys`). Called by the server, and by a worker for its
replica in mode GEO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_train.parameter_server.storage.hash_index import HashIndex
from stoker_train.parameter_server.storage.keys import server_of
from stoker_train.parameter_server.storage.spec import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stoker_train.parameter_server.storage.spec import TableSpec

    Keys = NDArray[np.int64]
    Arrays = dict[str, NDArray[Any]]

_LEAST_ROWS = 256


class SparseShard:
    """Rows of ``spec.width`` elements by key. ``now_s`` of a call is when it is, in seconds of any clock."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._index = HashIndex()
        self._keys = np.empty(0, np.int64)
        self._used_s = np.empty(0)
        self._rows = np.empty((0, spec.width), dtype_of(spec))
        self._states = {
            name: np.empty((0, width), np.int32 if name == "steps" else dtype_of(spec))
            for name, width in spec.optimizer.states(spec.width).items()
        }

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Memory that it takes, with the room for rows to come."""
        arrays = (self._keys, self._used_s, self._rows, *self._states.values())
        return self._index.nbytes + sum(array.nbytes for array in arrays)

    @property
    def keys(self) -> Keys:
        """The keys of all rows, by slot."""
        return self._keys[: len(self)]

    @property
    def room(self) -> int:
        """Rows that it has memory for."""
        return self._keys.size

    def pull(
        self,
        keys: Keys,
        now_s: float = 0.0,
        *,
        create: bool = True,
        empty: Callable[..., NDArray[Any]] = np.empty,
    ) -> NDArray[Any]:
        """Return (keys, width) rows; those that are not there are made, if not ``create`` only computed."""
        slots = self.slots(keys, now_s) if create else self._index.find(keys)
        rows = empty((keys.size, self.spec.width), self._rows.dtype)
        if len(self):
            np.take(self._rows, slots, axis=0, out=rows, mode="clip")
        if not create and (missing := slots < 0).any():
            rows[missing] = self._first_rows(keys[missing])
        return rows

    def push(self, keys: Keys, gradients: NDArray[Any], now_s: float = 0.0) -> None:
        """Have the optimizer step the rows of ``keys``."""
        slots = self.slots(keys, now_s)
        self._used_s[slots] = now_s
        self.spec.optimizer.apply(self._rows, self._states, slots, gradients)

    def add(self, keys: Keys, deltas: NDArray[Any], now_s: float = 0.0) -> None:
        """Add to the rows of ``keys``, without the optimizer."""
        slots = self.slots(keys, now_s)
        self._used_s[slots] = now_s
        self._rows[slots] += deltas

    def assign(self, keys: Keys, rows: NDArray[Any], now_s: float = 0.0) -> None:
        """Set the rows of ``keys``."""
        slots = self.slots(keys, now_s)
        self._used_s[slots] = now_s
        self._rows[slots] = rows

    def slots(self, keys: Keys, now_s: float = 0.0) -> NDArray[np.int32]:
        """Return the slots of rows, which are made where they are not there."""
        slots = self._index.find(keys)
        is_missing = slots < 0
        if is_missing.any():
            new = keys[is_missing]
            slots[is_missing] = self._make(new, self._first_rows(new), now_s)
        return slots

    def find(self, keys: Keys) -> NDArray[np.int32]:
        """Return the slots of rows, -1 for those that are not there."""
        return self._index.find(keys)

    def export(self, part: int = 0, parts: int = 1) -> Arrays:
        """Return copies of the rows that server ``part`` of ``parts`` has, with all that belongs to them."""
        count = len(self)
        chosen: Any = slice(count)
        if parts > 1:
            chosen = np.flatnonzero(server_of(self._keys[:count], parts) == part)
        arrays = {"keys": self._keys, "rows": self._rows, "used_s": self._used_s}
        arrays |= {f"state.{name}": array for name, array in self._states.items()}
        return {name: array[chosen].copy() for name, array in arrays.items()}

    def absorb(self, arrays: Arrays) -> None:
        """Take rows that another shard exported; one that is there is replaced."""
        keys = arrays["keys"]
        slots = self._index.find(keys)
        is_missing = slots < 0
        slots[is_missing] = self._make(keys[is_missing], arrays["rows"][is_missing], 0.0)
        self._rows[slots] = arrays["rows"]
        self._used_s[slots] = arrays["used_s"]
        for name, array in self._states.items():
            array[slots] = arrays[f"state.{name}"]

    def shrink(self, *, unused_since_s: float | None, max_norm: float | None) -> int:
        """Drop rows that no push reached since then, and those of a norm up to that; return how many."""
        count = len(self)
        drops = np.zeros(count, bool)
        if unused_since_s is not None:
            drops |= self._used_s[:count] < unused_since_s
        if max_norm is not None:
            drops |= np.linalg.norm(self._rows[:count], axis=1) <= max_norm
        if drops.any():
            kept = {name: array[~drops] for name, array in self.export().items()}
            self.__init__(self.spec)  # type: ignore[misc]
            self.absorb(kept)
        return int(drops.sum())

    def _first_rows(self, keys: Keys) -> NDArray[Any]:
        return self.spec.initializer.rows(keys, self.spec.width).astype(self._rows.dtype)

    def _make(self, keys: Keys, rows: NDArray[Any], now_s: float) -> NDArray[np.int32]:
        start, end = len(self), len(self) + keys.size
        if end > self._keys.size:
            room = max(_LEAST_ROWS, end, 2 * self._keys.size)
            self._keys, self._used_s = _grown(self._keys, room), _grown(self._used_s, room)
            self._rows = _grown(self._rows, room)
            self._states = {name: _grown(array, room) for name, array in self._states.items()}
        self._keys[start:end], self._used_s[start:end], self._rows[start:end] = keys, now_s, rows
        for array in self._states.values():
            array[start:end] = 0
        return self._index.add(keys)


def _grown(array: NDArray[Any], room: int) -> NDArray[Any]:
    """Return the array with room for so many rows; what is new has touched no memory yet."""
    grown = np.empty((room, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
