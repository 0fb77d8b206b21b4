"""A range of a file of the arena, mapped, to be checked and sent. For threads: it blocks.

``send`` from a mapping and not ``sendfile``: the kernel packs copied bytes into large buffers, where
``sendfile`` hands over one page at a time, which costs both ends more than the copy (ADR 0008).
"""

from __future__ import annotations

import mmap
import select
from typing import TYPE_CHECKING

import xxhash

from stoker_wire.data.range_reader import STALL_S

if TYPE_CHECKING:
    import socket

_SLICE_NBYTES = 1 << 20


class Window:
    """Bytes ``begin`` to ``end`` of a file; the mapping keeps the file open, and the lock it is under.

    ``checksum`` is the XXH3, if anybody has computed it.
    """

    def __init__(self, fd: int, begin: int, end: int, checksum: int | None = None) -> None:
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        self.checksum = checksum
        self._map = mmap.mmap(fd, end - start, prot=mmap.PROT_READ, offset=start)
        self._view = memoryview(self._map)[begin - start :]

    @property
    def nbytes(self) -> int:
        """How many bytes it shows."""
        return self._view.nbytes

    def check(self) -> None:
        """Compute the checksum, unless it is known."""
        if self.checksum is None:
            self.checksum = xxhash.xxh3_64_intdigest(self._view)

    def send(self, connection: socket.socket, stall_s: float = STALL_S) -> None:
        """Send all to a socket that does not block; OSError if it takes no byte for a while."""
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        sent = 0
        while sent < self._view.nbytes:
            try:
                sent += connection.send(self._view[sent : sent + _SLICE_NBYTES])
            except BlockingIOError:
                if not writable.poll(stall_s * 1000):
                    raise TimeoutError(f"the receiver took no byte for {stall_s:g} s") from None
