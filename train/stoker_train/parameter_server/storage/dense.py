"""A server's block of a dense table: consecutive elements of the flattened array, with their states.

Called by the server, and by a worker for its replica in mode GEO. Its optimizer sees it as one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_train.parameter_server.storage.spec import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stoker_train.parameter_server.storage.spec import TableSpec

    Arrays = dict[str, NDArray[Any]]

_ROW = np.zeros(1, np.int32)


class DenseShard:
    """Elements ``start`` to ``end`` of a dense table, as a vector.

    ``first`` of a call is the first element that is meant, which is less than the block only where a push
    was split by servers that were added meanwhile.
    """

    def __init__(self, spec: TableSpec, start: int, end: int) -> None:
        self.spec, self.start, self.end = spec, start, end
        keys = np.arange(start, end, dtype=np.int64)  # so elements differ, whatever the servers
        self.values = spec.initializer.rows(keys, 1).ravel().astype(dtype_of(spec))
        self._states = {
            name: np.zeros((1, end - start), np.int32 if name == "steps" else dtype_of(spec))
            for name in spec.optimizer.states(1)
        }

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + sum(array.nbytes for array in self._states.values())

    def pull(self, empty: Callable[..., NDArray[Any]] = np.empty) -> NDArray[Any]:
        """Return a copy of the elements."""
        copy = empty(self.values.shape, self.values.dtype)
        copy[:] = self.values
        return copy

    def push(self, first: int, gradient: NDArray[Any]) -> None:
        """Have the optimizer step elements."""
        here = self._slice(first, gradient)
        states = {name: array[:, here] for name, array in self._states.items()}
        self.spec.optimizer.apply(self.values[None, here], states, _ROW, gradient[None])

    def add(self, first: int, delta: NDArray[Any]) -> None:
        """Add to elements, without the optimizer."""
        self.values[self._slice(first, delta)] += delta

    def assign(self, first: int, values: NDArray[Any]) -> None:
        """Set elements."""
        self.values[self._slice(first, values)] = values

    def export(self) -> Arrays:
        """Return copies of all that it has."""
        arrays = {"start": np.array(self.start), "rows": self.values.copy()}
        return arrays | {f"state.{name}": array.copy() for name, array in self._states.items()}

    def absorb(self, arrays: Arrays) -> None:
        """Take those of the elements that another shard exported which belong here."""
        other = int(arrays["start"])
        first, last = max(self.start, other), min(self.end, other + arrays["rows"].size)
        if first >= last:
            return
        here, there = (
            slice(first - self.start, last - self.start),
            slice(first - other, last - other),
        )
        self.values[here] = arrays["rows"][there]
        for name, array in self._states.items():
            array[:, here] = arrays[f"state.{name}"][:, there]

    def _slice(self, first: int, values: NDArray[Any]) -> slice:
        return slice(first - self.start, first - self.start + values.size)
