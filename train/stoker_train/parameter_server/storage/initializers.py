"""First values of rows: by the seed and the row's key alone, whatever the order and the number of servers.

Each element is a hash of (seed, key, column), so that rows are made by any server, at any time, again and
again with the same values. Part of a table's specification; called by its shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each word: the finalizer of SplitMix64 (Steele et al. 2014), a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _uniform(keys: NDArray[np.int64], columns: NDArray[np.uint64], seed: int) -> NDArray[Any]:
    """Return (keys, columns) float64 in (0, 1), of 53 random bits each."""
    salt = np.uint64((seed * _GAMMA) & _WORD)
    of_keys = mix(mix(keys.view(np.uint64)) + salt)
    words = mix(of_keys[:, None] + (columns + np.uint64(1)) * np.uint64(_GAMMA))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


class Zeros(msgspec.Struct, frozen=True, tag=True):
    """All elements are 0."""

    def rows(self, keys: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return the first values of rows, (keys, width) float64."""
        return np.zeros((keys.size, width))


class Uniform(msgspec.Struct, frozen=True, tag=True):
    """Elements are uniform between ``low`` and ``high``."""

    low: float = -0.05
    high: float = 0.05
    seed: int = 0

    def rows(self, keys: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return the first values of rows, (keys, width) float64."""
        columns = np.arange(width, dtype=np.uint64)
        return self.low + (self.high - self.low) * _uniform(keys, columns, self.seed)


class Normal(msgspec.Struct, frozen=True, tag=True):
    """Elements are normal (by the transform of Box and Muller)."""

    mean: float = 0.0
    std: float = 0.01
    seed: int = 0

    def rows(self, keys: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return the first values of rows, (keys, width) float64."""
        columns = np.arange(2 * width, dtype=np.uint64)
        uniform = _uniform(keys, columns, self.seed)
        radius = np.sqrt(-2.0 * np.log(uniform[:, :width]))
        rows: NDArray[Any] = radius * np.cos(2.0 * np.pi * uniform[:, width:])
        return self.mean + self.std * rows


Initializer = Zeros | Uniform | Normal
