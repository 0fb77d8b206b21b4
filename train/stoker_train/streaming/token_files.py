"""Read windows of tokens out of arrays in files, which are mapped to memory and not read whole.

For pre-training: each record is ``length`` tokens that follow each other. NumPy (``.npy``), safetensors and
plain arrays (any other suffix).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.streaming.files import is_compressed
from stoker_train.streaming.parsers import fewer, packed, steps

__all__ = ("Tokens",)

_DTYPES = {
    "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8",
}  # fmt: skip
"""safetensors' names of NumPy's types."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Windows of ``length`` values of an array that is flattened; those left at a file's end are dropped.

    A record is an array (length,), of the type in the file; ``dtype`` is that of plain files. A window
    begins ``stride`` values after the one before (``length`` unless given: no value comes twice).
    ``tensor`` is the name of the tensor in safetensors files that have more than one.
    """

    length: int
    dtype: str = "uint16"
    stride: int | None = None
    tensor: str | None = None

    def __post_init__(self) -> None:
        for field, value in (("length", self.length), ("stride", self.stride)):
            if value is not None and value < 1:
                raise BadRequestError(f"{field}={value} of Tokens()\ngive 1 or more", field=field)

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of windows."""
        values = self._values(path)
        stride = self.stride or self.length
        windows = max(0, (len(values) - self.length) // stride + 1)
        each = stride * values.itemsize
        for start, stop in steps(windows, max(1, nbytes // each)):
            yield start, stop, (stop - start) * each

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[np.ndarray]:
        """Yield windows."""
        values = self._values(path)
        stride = self.stride or self.length
        for number in range(start + skip, stop):
            window = np.array(values[number * stride : number * stride + self.length])
            if len(window) < self.length:
                raise fewer(path, number, stop)
            yield window

    def count(self, path: str, start: int, stop: int) -> int:
        """Return the windows of a range."""
        return stop - start

    def _values(self, path: str) -> np.ndarray:
        """Return the array of a file, flat."""
        if is_compressed(path):
            raise packed(path)
        try:
            if path.endswith(".npy"):
                values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            elif path.endswith(".safetensors"):
                values = self._safetensors(path)
            elif not os.path.getsize(path):
                values = np.zeros(0, self.dtype)  # which cannot be mapped
            else:
                values = np.memmap(path, self.dtype, "r")
        except (OSError, ValueError) as error:
            if isinstance(error, BadRequestError):
                raise
            raise BadRequestError(
                f"no tokens can be read from {path!r}\n{error}", field="files"
            ) from error
        return values.reshape(-1)

    def _safetensors(self, path: str) -> np.ndarray:
        """Map a tensor: 8 bytes with the length of a JSON header, the header, the data."""
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        name = self.tensor if self.tensor is not None else next(iter(header), "")
        if name not in header or (self.tensor is None and len(header) > 1):
            raise BadRequestError(
                f"the tensor to read of {path!r} is not known\n"
                f"give tensor= as one of {', '.join(sorted(header))}",
                field="tensor",
            )
        told = header[name]
        if told["dtype"] not in _DTYPES:
            raise BadRequestError(
                f"tensor {name!r} of {path!r} is of type {told['dtype']}\nkeep tokens as integers",
                field="tensor",
            )
        start, stop = told["data_offsets"]
        dtype = np.dtype("<" + _DTYPES[told["dtype"]])
        count = (stop - start) // dtype.itemsize
        return np.memmap(path, dtype, "r", offset=8 + length + start, shape=(count,))
