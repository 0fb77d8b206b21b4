"""Checks of what users give, before it is sent: each error names the field, the table and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.storage.spec import dtype_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from stoker_train.parameter_server.storage.spec import TableSpec

_KEY_KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def checked_keys(spec: TableSpec, keys: ArrayLike) -> NDArray[np.int64]:
    """Return keys as int64, in any shape; BadRequestError for what is no array of whole numbers."""
    array = np.asarray(keys)
    if array.size == 0 and array.dtype == np.float64:  # an empty list
        return array.astype(np.int64)
    if array.dtype.name not in _KEY_KINDS:
        raise BadRequestError(
            f"keys of table {spec.name!r} have the dtype {array.dtype}\n"
            "give whole numbers of up to 64 bits with a sign, as keys.astype(numpy.int64)",
            field="keys",
        )
    return array.astype(np.int64, copy=False)


def checked_values(
    spec: TableSpec, shape: tuple[int, ...], values: ArrayLike, field: str = "gradients"
) -> NDArray[Any]:
    """Return values in the table's dtype; BadRequestError if their shape differs, or one is not finite."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise BadRequestError(
            f"{field} for table {spec.name!r} have the dtype {array.dtype}\ngive {spec.dtype}",
            field=field,
        )
    if array.shape != shape:
        raise BadRequestError(
            f"{field} for table {spec.name!r} have the shape {array.shape}\n"
            f"give {shape}: {_reason(spec)}",
            field=field,
        )
    array = np.ascontiguousarray(array, dtype_of(spec))
    if not _is_finite(array):
        count = int((~np.isfinite(array)).sum())
        raise BadRequestError(
            f"{field} for table {spec.name!r} are not finite in {count} places\n"
            f"the first is {_first(array)}: nothing was sent; skip this batch, clip, or lower lr",
            field=field,
        )
    return array


def _is_finite(array: NDArray[Any]) -> bool:
    flat = array.ravel()
    with np.errstate(
        all="ignore"
    ):  # squares add up to a number only if all are: the quickest pass there is
        return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(flat).all())


def _reason(spec: TableSpec) -> str:
    if spec.shape is not None:
        return "that of the table"
    return f"a row of {spec.width} for each key"


def _first(array: NDArray[Any]) -> str:
    place = tuple(int(one[0]) for one in np.nonzero(~np.isfinite(array)))
    return f"{array[place]} at {place}"
