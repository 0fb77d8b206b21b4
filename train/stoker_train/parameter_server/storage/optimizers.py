"""The optimizers of tables: one step on some rows, with their states beside them.

Rows without a gradient keep their states (as PyTorch's SparseAdam and sparse Adagrad). Work goes by blocks
that stay in a core's cache. Called by shards; gradients name each row once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Slots = NDArray[np.int32]
    States = Mapping[str, NDArray[Any]]

_BLOCK_ELEMENTS = 1 << 15


def _blocks(slots: Slots, gradients: NDArray[Any]) -> Iterator[tuple[Slots, NDArray[Any]]]:
    count = max(1, _BLOCK_ELEMENTS // max(1, gradients.shape[1]))
    for start in range(0, slots.size, count):
        yield slots[start : start + count], gradients[start : start + count]


def _take(rows: NDArray[Any], slots: Slots) -> NDArray[Any]:
    return rows.take(slots, axis=0, mode="clip")


class SGD(msgspec.Struct, frozen=True, tag=True):
    """w -= lr * g; with ``momentum`` m: v = m * v + g, w -= lr * v."""

    lr: float = 0.01
    momentum: float = 0.0

    def states(self, width: int) -> dict[str, int]:
        """Return the names of the states of a row, and how many elements each has."""
        return {"momentum": width} if self.momentum else {}

    def apply(
        self, rows: NDArray[Any], states: States, slots: Slots, gradients: NDArray[Any]
    ) -> None:
        """Step the rows at ``slots`` by ``gradients``, in place."""
        for some, gradient in _blocks(slots, gradients):
            if self.momentum:
                moved = _take(states["momentum"], some)
                moved *= self.momentum
                moved += gradient
                states["momentum"][some] = moved
                moved *= self.lr
            else:
                moved = gradient * rows.dtype.type(self.lr)
            np.subtract(_take(rows, some), moved, out=moved)
            rows[some] = moved


class Adagrad(msgspec.Struct, frozen=True, tag=True):
    """a += g²; w -= lr * g / (√a + eps) (Duchi et al. 2011, as PyTorch)."""

    lr: float = 0.01
    eps: float = 1e-10

    def states(self, width: int) -> dict[str, int]:
        """Return the names of the states of a row, and how many elements each has."""
        return {"sum": width}

    def apply(
        self, rows: NDArray[Any], states: States, slots: Slots, gradients: NDArray[Any]
    ) -> None:
        """Step the rows at ``slots`` by ``gradients``, in place."""
        for some, gradient in _blocks(slots, gradients):
            total = _take(states["sum"], some)
            moved = gradient * gradient
            total += moved
            states["sum"][some] = total
            np.sqrt(total, out=total)
            total += self.eps
            np.divide(gradient, total, out=moved)
            moved *= self.lr
            np.subtract(_take(rows, some), moved, out=moved)
            rows[some] = moved


class Adam(msgspec.Struct, frozen=True, tag=True):
    """Adam (Kingma and Ba 2015), with its bias corrected by how often the row itself was stepped."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def states(self, width: int) -> dict[str, int]:
        """Return the names of the states of a row, and how many elements each has."""
        return {"first": width, "second": width, "steps": 1}

    def apply(
        self, rows: NDArray[Any], states: States, slots: Slots, gradients: NDArray[Any]
    ) -> None:
        """Step the rows at ``slots`` by ``gradients``, in place."""
        for some, gradient in _blocks(slots, gradients):
            first, second = _take(states["first"], some), _take(states["second"], some)
            first *= self.beta1
            first += (1.0 - self.beta1) * gradient
            second *= self.beta2
            second += (1.0 - self.beta2) * gradient * gradient
            steps = _take(states["steps"], some) + 1
            states["first"][some], states["second"][some] = first, second
            states["steps"][some] = steps
            number = steps.astype(np.float64)
            of_first = (self.lr / (1.0 - self.beta1**number)).astype(rows.dtype)
            of_second = np.sqrt(1.0 - self.beta2**number).astype(rows.dtype)
            np.sqrt(second, out=second)
            second /= of_second
            second += self.eps
            first *= of_first
            first /= second
            rows[some] = _take(rows, some) - first


Optimizer = SGD | Adagrad | Adam
