"""Functions and classes as they travel: pickled once, and named by the hash of the pickle."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle

from stoker.exceptions import BadRequestError
from stoker.runtime.serialization.pickling import collected_refs, pack

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef

_LARGE_NBYTES = 10 << 20
"""Larger pickles of functions and classes cause a warning."""
INLINE_NBYTES = 8 << 10
"""A pickled function or class up to this size goes with its calls; a worker asks the gcs for larger ones."""
TEMPLATE_NUMBERS = itertools.count(1)
"""Numbers of call templates, unique on the channels of this process."""


def pickled(value: Any, *, what: str) -> tuple[bytes, str, tuple[ObjectRef[Any], ...]]:
    """Return a pickled function or class, the hash that names it, and the refs inside."""
    packed = pack(value, what=what)
    # The values that a function closes over travel with it, in one piece.
    blob = packed.data
    if packed.buffers:
        with collected_refs():
            blob = cloudpickle.dumps(value, 5)
    if len(blob) > _LARGE_NBYTES:
        _warn_of_size(value, what, len(blob))
    return blob, hashlib.sha256(blob).hexdigest(), tuple(packed.refs)


def _warn_of_size(value: Any, what: str, nbytes: int) -> None:
    """Warn of a large function or class, and name the largest value that it refers to."""
    import warnings

    code, module = getattr(value, "__code__", None), getattr(value, "__globals__", {})
    captured = {name: module[name] for name in getattr(code, "co_names", ()) if name in module}
    with contextlib.suppress(ValueError):  # a closure with a variable that is not set yet
        captured |= inspect.getclosurevars(value).nonlocals if code is not None else vars(value)
    sizes = {name: _nbytes_of(value) for name, value in captured.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    named = f"; {largest!r} alone has {sizes[largest]:,}" if largest and sizes[largest] else ""
    warnings.warn(
        f"{what} is {nbytes:,} bytes when pickled{named}: each worker reads it. Pass large values as "
        "arguments, from stoker.put()",
        stacklevel=5,
    )


def _nbytes_of(value: Any) -> int:
    """Return the size of a value, as far as it is known without pickling it."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    return len(value) if isinstance(value, (bytes, bytearray, str)) else sys.getsizeof(value)


DYNAMIC = "dynamic"
"""The ``num_returns`` of a generator whose one result is a tuple of refs to what it yields."""


class PickledTypes(bytes):
    """The exception types to retry as the handle of an actor carries them: only its worker reads them."""

    __slots__ = ()


def pickled_exception_types(types: Any) -> bytes:
    """Return the exception types to retry, pickled: b'' for none."""
    if not types:
        return b""
    if isinstance(types, PickledTypes):
        return types
    if types is not True:
        if isinstance(types, type):
            types = [types]
        if not all(isinstance(t, type) and issubclass(t, BaseException) for t in types):
            raise BadRequestError(
                f"retry_exceptions={types!r}: give True, False or a list of exception types",
                field="retry_exceptions",
            )
        types = list(types)
    return pickled(types, what="retry_exceptions")[0]


def is_generator(function: Any) -> bool:
    """Return whether a function is a generator, async or not."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def returns_of(num_returns: Any, *, generates: bool) -> tuple[int, bool]:
    """Return (number of results, whether they stream); generators stream by default."""
    if num_returns is None:
        num_returns = "streaming" if generates else 1
    if num_returns == "streaming":
        return 0, True
    if num_returns == DYNAMIC:
        return 1, False
    return int(num_returns), False
