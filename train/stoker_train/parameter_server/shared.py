"""One array in a node's shared memory that several processes update without locks (Hogwild).

Niu et al. 2011: where updates touch few elements, what two processes lose by writing the same one at once is
noise. The memory has no name in the file system: it is an open file of the process that made it, from which
others on the node map it, and it is gone with the last of them.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.errors import ParameterServerError
from stoker_train.parameter_server.storage.spec import is_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray


class SharedArray:
    """An array that tasks and actors on the same node share with the process that made it.

    Passed as an argument it is the same memory there, not a copy. Its maker holds it until all have read
    ``array`` once; who has, keeps the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, source: tuple[str, int, int]) -> None:
        self.shape, self.dtype = shape, dtype
        self._source = source
        self._array: NDArray[Any] | None = None
        self._file = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArray, (self.shape, self.dtype, self._source)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    @property
    def array(self) -> NDArray[Any]:
        """The memory, to be read and written; ParameterServerError elsewhere, or if its maker is gone."""
        if self._array is None:
            host, pid, number = self._source
            try:
                if host != _host():
                    raise FileNotFoundError(f"it is on {host}, this process on {_host()}")
                file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            except OSError as error:
                raise ParameterServerError(
                    f"the shared array of process {pid} cannot be mapped\n{error}\n"
                    "use it on the node of the process that made it, as the same user, while that one lives"
                ) from error
            try:
                self._map(file)
            finally:
                os.close(file)
        assert self._array is not None
        return self._array

    def _map(self, file: int) -> None:
        nbytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if os.fstat(file).st_size != max(1, nbytes):
            raise ParameterServerError(
                "the shared array is no longer there\nits maker has dropped it: keep it there"
            )
        memory = mmap.mmap(file, max(1, nbytes))
        self._array = np.frombuffer(memory, self.dtype, math.prod(self.shape)).reshape(self.shape)


def shared(shape: int | Sequence[int], dtype: DTypeLike = "float32") -> SharedArray:
    """Make an array of zeros in this node's shared memory, for lock-free updates by several processes.

    ``array[rows] -= lr * gradients`` in each of them is one Hogwild step. An element that two write at the
    same time has the value of one of them; a row is not read or written in one go.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = np.dtype(dtype)
    if kind.hasobject or not all(is_count(one, 0) for one in lengths):
        raise BadRequestError(
            f"a shared array has the shape {lengths} and the dtype {kind}\n"
            "give whole numbers, and a dtype without Python objects",
            field="shape",
        )
    file = os.memfd_create("stoker-shared-array", os.MFD_CLOEXEC)
    os.ftruncate(file, max(1, math.prod(lengths) * kind.itemsize))
    made = SharedArray(lengths, kind.str, (_host(), os.getpid(), file))
    made._file = file
    made._map(file)
    return made


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()}/{file.read().strip()}"
