"""Files that are whole or not there, and their checksums: what all checkpoints are written by.

Called by the checkpoints of elastic and of sharded training. Nothing here knows what is in a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("SummedFile", "file_sum", "sync_folder", "whole_file")

_BLOCK_BYTES = 1 << 22


class SummedFile:
    """A file to write to, from its beginning to its end, that knows the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        """Write and add to the sum."""
        self.sum.update(data)
        written = self._file.write(data)
        self.nbytes += written
        return written

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.nbytes

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()

    def close(self) -> None:
        """Do nothing: who opened the file closes it."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is there under its name once all is written and on the disk, or not at all.

    Until then it is ``.{name}.{host}-{pid}-{random}`` beside it. Raises the OSError of the disk.
    """
    unique = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    partial = path.with_name(f".{path.name}.{unique}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_sum(path: Path) -> str:
    """Return the checksum (XXH3, 128 bits, in hex) of a file, read in blocks."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
