"""The specification of a table: what all its servers and clients agree on. It travels with every request.

So a server that starts again makes its tables by itself, and a client that means another width is told.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.parameter_server.storage.initializers import Initializer, Zeros
from stoker_train.parameter_server.storage.optimizers import SGD, Optimizer

_DTYPES = ("float32", "float64")


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One table: rows of ``width`` elements by key, or one dense array of ``shape``."""

    name: str
    width: int = 1
    shape: tuple[int, ...] | None = None
    """Of a dense table; None for a sparse one."""
    dtype: str = "float32"
    optimizer: Optimizer = msgspec.field(default_factory=SGD)
    initializer: Initializer = msgspec.field(default_factory=Zeros)

    @property
    def size(self) -> int:
        """Number of elements of a dense table."""
        return math.prod(self.shape or ())

    @property
    def kind(self) -> str:
        """The word for it: sparse or dense."""
        return "sparse" if self.shape is None else "dense"


def check_spec(spec: TableSpec) -> TableSpec:
    """Return the specification, or raise BadRequestError that names the field at fault."""
    if not is_name(spec.name):
        raise BadRequestError(
            f"a table has the name {spec.name!r}\ngive a text without a slash", field="name"
        )
    if not is_count(spec.width, 1):
        raise BadRequestError(
            f"table {spec.name!r} has the width {spec.width!r}\ngive the number of elements of a row",
            field="width",
        )
    if spec.shape is not None and not all(is_count(one, 0) for one in spec.shape):
        raise BadRequestError(
            f"table {spec.name!r} has the shape {spec.shape!r}\ngive whole numbers", field="shape"
        )
    if spec.dtype not in _DTYPES:
        raise BadRequestError(
            f"table {spec.name!r} has the dtype {spec.dtype!r}\ngive one of {', '.join(_DTYPES)}",
            field="dtype",
        )
    for field, value, kinds in (
        ("optimizer", spec.optimizer, Optimizer),
        ("initializer", spec.initializer, Initializer),
    ):
        if not isinstance(value, kinds):
            raise BadRequestError(
                f"table {spec.name!r} has an {field} that is a {type(value).__name__}\n"
                f"give one of {', '.join(one.__name__ for one in kinds.__args__)}",
                field=field,
            )
    return spec


def is_count(value: object, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_name(value: object) -> bool:
    """Return whether a value may be a name."""
    return isinstance(value, str) and bool(value) and "/" not in value


def check_same(there: TableSpec, given: TableSpec) -> None:
    """Raise ConflictError that names the first field in which a table is not the one that is there."""
    for field in ("shape", "width", "dtype", "optimizer", "initializer"):
        has, means = getattr(there, field), getattr(given, field)
        if has != means:
            raise ConflictError(
                f"table {given.name!r} is there with another {field}\n"
                f"it has {field}={has!r}, and {means!r} was given: give the same, or another name",
                field=field,
            )


def dtype_of(spec: TableSpec) -> np.dtype[np.floating]:
    """Return the dtype of the table's elements."""
    return np.dtype(spec.dtype)
