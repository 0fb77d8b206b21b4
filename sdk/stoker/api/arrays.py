"""Arrays in shared memory, to be filled in place: ``stoker.empty``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

from stoker.runtime import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = float) -> NDArray[Any]:
    """Return a new array as ``numpy.empty(shape, dtype)`` does, in the node's shared memory.

    Fill it, then return it from a task or method, or ``put`` it: its bytes are the object's, and are not
    copied. It is written to no more then: what is written later is seen by this process alone. The same holds
    for a tensor over it (``torch.from_numpy``). A part that does not begin where the array does is copied,
    and so is an array that is not the first of several in one value; small arrays always are. Arrays that are
    never stored are ordinary memory. Contents are arbitrary; ``dtype`` may be any without Python objects.
    """
    import numpy

    kind, lengths = numpy.dtype(dtype), _lengths(shape)
    memory = None
    if not kind.hasobject and min(lengths, default=0) >= 0:
        nbytes = math.prod(lengths, start=kind.itemsize)
        memory = current.runtime().objects.values.allocate(nbytes)
    if memory is None:
        return numpy.empty(lengths, kind)
    return numpy.frombuffer(memory, kind).reshape(lengths)


def _lengths(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, Iterable) else (shape,)
    return tuple(map(operator.index, lengths))
