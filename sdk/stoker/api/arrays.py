"""Arrays in shared memory, to be filled in place: ``stoker.empty``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.api import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy
    from numpy.typing import DTypeLike, NDArray


def empty(shape: int | Sequence[int], dtype: DTypeLike = float) -> NDArray[Any]:
    """Return a new array as ``numpy.empty(shape, dtype)`` does, in the node's shared memory.

    Fill it, then return it from a task or method, or ``put`` it: its bytes are the object's, and are not
    copied. It is written to no more then: what is written later is seen by this process alone. The same holds
    for a tensor over it (``torch.from_numpy``). A part that does not begin where the array does is copied,
    and so is an array that is not the first of several in one value; small arrays always are. Arrays that are
    never stored are ordinary memory. Contents are arbitrary; ``dtype`` may be any without Python objects.
    """
    import numpy

    kind = numpy.dtype(dtype)
    memory = None
    if not kind.hasobject:
        memory = current.runtime().objects.values.allocate(_nbytes(shape, kind))
    if memory is None:
        return numpy.empty(shape, kind)
    return numpy.frombuffer(memory, kind).reshape(shape)


def _nbytes(shape: int | Sequence[int], kind: numpy.dtype[Any]) -> int:
    nbytes = kind.itemsize
    for length in (shape,) if isinstance(shape, int) else shape:
        nbytes *= length
    return nbytes
