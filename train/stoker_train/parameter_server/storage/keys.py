"""Arrays of keys: which server has which, each key once, and gradients of equal keys added up.

Sums are made in the order in which keys come, so that they are the same each time. Called by clients before
they send, and by servers that add up what several workers sent.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_train.parameter_server.storage.initializers import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.int64]


def are_unique(keys: Keys) -> bool:
    """Return whether each key is there once."""
    if (keys[1:] > keys[:-1]).all():
        return True
    ordered = np.sort(keys)
    return bool((ordered[1:] != ordered[:-1]).all())


def unique(keys: Keys) -> tuple[Keys, NDArray[np.int64] | None]:
    """Return each key once, and where each of ``keys`` is among them; None: they are the same."""
    if are_unique(keys):
        return keys, None
    return np.unique(keys, return_inverse=True)


def sum_equal(keys: Keys, values: NDArray[Any]) -> tuple[Keys, NDArray[Any]]:
    """Return each key once, and the sum of its rows of ``values``, first ones first."""
    if are_unique(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return ordered[starts], np.add.reduceat(values[order], starts, axis=0)


def server_of(keys: Keys, servers: int) -> NDArray[np.int64]:
    """Return the number of the server that has each key."""
    words = mix(keys.view(np.uint64)) >> np.uint64(32)
    return ((words * np.uint64(servers)) >> np.uint64(32)).view(np.int64)


def split(keys: Keys, servers: int) -> list[NDArray[np.int64]]:
    """Return the places of the keys that each server has, in order."""
    owner = server_of(keys, servers).astype(np.int16 if servers < 1 << 15 else np.int64)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=servers))[:-1]
    return np.split(order, ends)


def dense_bounds(size: int, servers: int) -> list[tuple[int, int]]:
    """Return the first element, and the one behind the last, of each server's part of a dense table."""
    edges = [size * number // servers for number in range(servers + 1)]
    return list(itertools.pairwise(edges))
