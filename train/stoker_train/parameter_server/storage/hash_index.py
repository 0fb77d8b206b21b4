"""Slots of rows by key: a hash table of open addressing in NumPy arrays, probed by whole arrays of keys.

Linear probing with at most half of the places taken; the home of a key is the high bits of a product (Knuth,
TAOCP 3, 6.4: multiplicative hashing). Called by a table's shard. Rows are never taken out one by one: who
drops some makes a new index of those that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_LEAST_BITS = 10


class HashIndex:
    """Slots 0, 1, 2, ... of int64 keys, in the order in which they were added."""

    def __init__(self) -> None:
        self._count = 0
        self._make(_LEAST_BITS)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the hash table."""
        return self._keys.nbytes + self._slots.nbytes

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each key, -1 for one that is not there."""
        places = self._homes(keys)
        slots = self._slots[places]
        wrong = np.flatnonzero((self._keys[places] != keys) & (slots >= 0))
        while wrong.size:
            places[wrong] = (places[wrong] + 1) & self._mask
            there = places[wrong]
            found = self._slots[there]
            slots[wrong] = found
            wrong = wrong[(self._keys[there] != keys[wrong]) & (found >= 0)]
        return slots

    def add(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Give slots to keys, each of which is there once and not yet in the index."""
        total = self._count + keys.size
        if 2 * total > self._slots.size:
            old_keys, old_slots = self._keys, self._slots
            taken = old_slots >= 0
            self._make(int(2 * total - 1).bit_length())
            self._place(old_keys[taken], old_slots[taken])
        slots = np.arange(self._count, total, dtype=np.int32)
        self._place(keys, slots)
        self._count = total
        return slots

    def _make(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)
        self._keys = np.zeros(1 << bits, np.int64)
        self._slots = np.full(1 << bits, -1, np.int32)

    def _homes(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((keys.view(np.uint64) * _MULTIPLIER) >> self._shift).view(np.int64)

    def _place(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
        places = self._homes(keys)
        waiting = np.arange(keys.size)
        while waiting.size:
            there = places[waiting]
            is_free = self._slots[there] < 0
            trying, there = waiting[is_free], there[is_free]
            self._slots[there] = slots[trying]  # of several at one place the last stays
            has_won = self._slots[there] == slots[trying]
            self._keys[there[has_won]] = keys[trying[has_won]]
            waiting = np.concatenate((waiting[~is_free], trying[~has_won]))
            places[waiting] = (places[waiting] + 1) & self._mask
