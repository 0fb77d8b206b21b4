"""The tables that users pull from and push to: sparse ones by keys, dense ones whole.

A push of a table by itself is applied at once; workers (:mod:`stoker_train.parameter_server.client.worker`)
push at the end of a step, as their mode says. Tables can be passed to tasks and actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.client.checks import checked_keys, checked_values
from stoker_train.parameter_server.server.messages import Part
from stoker_train.parameter_server.storage.keys import sum_equal, unique

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from stoker_train.parameter_server.client.routing import Routing
    from stoker_train.parameter_server.storage.spec import TableSpec


class SparseTable:
    """Rows of ``width`` elements by int64 key, spread over the servers by a hash of the key."""

    def __init__(self, spec: TableSpec, routing: Routing) -> None:
        self.spec = spec
        self._routing = routing

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    def pull(self, keys: ArrayLike, *, create: bool = True) -> NDArray[Any]:
        """Return rows, of the shape of ``keys`` and the width; read-only where they were not copied.

        Rows that are not there are made; with ``create=False`` they are only computed, as for an evaluation.
        """
        return pull_unique(
            self.spec, keys, lambda found: self._routing.pull(self.spec, found, create)
        )

    def push(self, keys: ArrayLike, gradients: ArrayLike) -> None:
        """Have the table's optimizer step rows by gradients, those of equal keys added up.

        Returns when all servers have applied it, each once.
        """
        self._routing.push([sparse_part(self.spec, keys, gradients)])

    def assign(self, keys: ArrayLike, rows: ArrayLike) -> None:
        """Set rows; of equal keys the last counts."""
        found = checked_keys(self.spec, keys)
        values = checked_values(self.spec, (*found.shape, self.spec.width), rows, "rows")
        flat = found.ravel()
        last, at = np.unique(flat[::-1], return_index=True)
        part = Part(self.spec, last, values.reshape(flat.size, -1)[flat.size - 1 - at])
        self._routing.push([part], "assign")

    def shrink(self, *, unused_s: float | None = None, max_norm: float | None = None) -> int:
        """Drop rows that no push reached for ``unused_s`` seconds, or of a norm up to ``max_norm``.

        Returns how many rows were dropped. They are made anew when they are used again.
        """
        if unused_s is None and max_norm is None:
            raise BadRequestError(
                "shrink() has nothing to choose rows by\ngive unused_s or max_norm",
                field="unused_s",
            )
        return sum(self._routing.ask_all("shrink", self.name, unused_s, max_norm))


class DenseTable:
    """One array, spread over the servers by blocks."""

    def __init__(self, spec: TableSpec, routing: Routing) -> None:
        self.spec = spec
        self._routing = routing

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    def pull(self) -> NDArray[Any]:
        """Return the array; read-only where it was not copied."""
        return self._routing.pull_dense(self.spec).reshape(self.spec.shape or ())

    def push(self, gradients: ArrayLike) -> None:
        """Have the table's optimizer step the array; returns when all servers have, each once."""
        self._routing.push([dense_part(self.spec, gradients)])

    def assign(self, values: ArrayLike) -> None:
        """Set the array."""
        self._routing.push([dense_part(self.spec, values, "values")], "assign")


Table = SparseTable | DenseTable


def pull_unique(spec: TableSpec, keys: ArrayLike, pull: Any) -> NDArray[Any]:
    """Return rows in the shape of ``keys``, by a ``pull`` of each key once."""
    found = checked_keys(spec, keys)
    once, places = unique(found.ravel())
    rows: NDArray[Any] = pull(once)
    if places is not None:
        rows = rows.take(places.ravel(), axis=0)
    return rows.reshape(*found.shape, spec.width)


def sparse_part(spec: TableSpec, keys: ArrayLike, gradients: ArrayLike) -> Part:
    """Return a part with each key once; BadRequestError names what does not fit."""
    found = checked_keys(spec, keys)
    values = checked_values(spec, (*found.shape, spec.width), gradients)
    return Part(spec, *sum_equal(found.ravel(), values.reshape(found.size, spec.width)))


def dense_part(spec: TableSpec, values: ArrayLike, field: str = "gradients") -> Part:
    """Return a part with the whole array."""
    assert spec.shape is not None
    array = checked_values(spec, spec.shape, values, field)
    return Part(spec, np.array([0, spec.size]), array.ravel())
