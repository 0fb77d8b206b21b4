"""The chunks of an object on its way into the arena: those that are there, and the waits for others.

Filled by a pull; read by ``RangeServer``, which passes chunks on to other nodes while later ones arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from typing import TYPE_CHECKING

from stoker_wire.data.range_reader import CHUNK_NBYTES

if TYPE_CHECKING:
    import mmap


class ChunkMap:
    """State of each chunk, of an object that arrives in ``memory``."""

    def __init__(self, nbytes: int, memory: mmap.mmap) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.checksums: list[int | None] = [None] * count_chunks(nbytes)
        """Of the chunks that were received and verified."""
        self.ready = 0
        """The number of chunks that are there, counted from the start without a gap."""
        self.arrived_nbytes = 0
        self._missing = list(range(len(self.checksums)))
        self._changed = asyncio.Event()

    @property
    def whole(self) -> bool:
        """Return whether all chunks are there."""
        return self.ready == len(self.checksums)

    def claim(self) -> int | None:
        """Claim and return the first chunk that nobody fetches yet."""
        return heapq.heappop(self._missing) if self._missing else None

    def give_back(self, chunk: int) -> None:
        """Return a claimed chunk that did not arrive; another stream may fetch it."""
        heapq.heappush(self._missing, chunk)

    def add(self, chunk: int, checksum: int) -> None:
        """Record a chunk that was received and verified."""
        self.checksums[chunk] = checksum
        self.arrived_nbytes += span_of(chunk, self.nbytes)[1]
        while self.ready < len(self.checksums) and self.checksums[self.ready] is not None:
            self.ready += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, chunk: int, wait_s: float) -> None:
        """Wait until ``chunk`` and all before it are there, at most ``wait_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.ready <= chunk:
                    await self._changed.wait()


def count_chunks(nbytes: int) -> int:
    """Return how many chunks an object has."""
    return -(-nbytes // CHUNK_NBYTES)


def span_of(chunk: int, nbytes: int) -> tuple[int, int]:
    """Return where a chunk of an object begins, and its length."""
    begin = chunk * CHUNK_NBYTES
    return begin, min(CHUNK_NBYTES, nbytes - begin)
