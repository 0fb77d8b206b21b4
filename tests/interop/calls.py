"""Functions that the tests of libraries have called in workers, which import this module: it is light."""

from __future__ import annotations

import os
from typing import Any


def square(x: int) -> int:
    """Return the square."""
    return x * x


def pid(_: Any) -> int:
    """Return the process in which it was called."""
    return os.getpid()


def nested_sum(n: int) -> int:
    """Return a sum of squares, made by a Parallel of its own."""
    from joblib import Parallel, delayed

    return sum(Parallel(n_jobs=2)(delayed(square)(i) for i in range(n)))


def is_writeable(array: Any) -> bool:
    """Return whether an array can be written to."""
    return bool(array.flags.writeable)
