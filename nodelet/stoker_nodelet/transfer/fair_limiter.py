"""Fair concurrency limit for chunk transfers: N slots, handed out round-robin over keys (objects).

Each end of a node's transfers has a limiter of its own. Small chunks have slots of their own, so that
they never wait for large ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_NBYTES = 1 << 20


class FairLimiter:
    """``slots`` chunks at once, of at most ``nbytes`` together; as many small ones besides."""

    def __init__(self, slots: int, nbytes: int) -> None:
        self._large = _FairQueue(slots, nbytes)
        self._small = _FairQueue(slots, nbytes)

    @asynccontextmanager
    async def slot(self, key: str, nbytes: int) -> AsyncIterator[None]:
        """Hold a slot to move ``nbytes``; waits until one is free, in turn with other keys."""
        queue = self._small if nbytes <= SMALL_NBYTES else self._large
        await queue.acquire(key, nbytes)
        try:
            yield
        finally:
            queue.release(nbytes)

    @property
    def nbytes_moving(self) -> int:
        """Bytes of the chunks that hold a slot."""
        return self._large.nbytes + self._small.nbytes


class _FairQueue:
    """Round-robin queue over keys, bounded by a count and by bytes; one chunk always fits."""

    def __init__(self, slots: int, max_nbytes: int) -> None:
        self.nbytes = 0
        self._taken = 0
        self._slots = slots
        self._max_nbytes = max_nbytes
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def acquire(self, key: str, nbytes: int) -> None:
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append((slot, nbytes))
        try:
            await slot
        except BaseException:
            if slot.done() and not slot.cancelled():
                self.release(nbytes)  # it was granted in the moment of the cancel
            else:
                slot.cancel()
                self._grant_next()
            raise

    def release(self, nbytes: int) -> None:
        self._taken -= 1
        self.nbytes -= nbytes
        self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting:
            key, queue = next(iter(self._waiting.items()))
            while queue and queue[0][0].cancelled():
                queue.popleft()
            if not queue:
                del self._waiting[key]
                continue
            slot, nbytes = queue[0]
            if not self._fits(nbytes):
                return
            queue.popleft()
            if queue:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            self._take(nbytes)
            slot.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self._taken == 0 or (
            self._taken < self._slots and self.nbytes + nbytes <= self._max_nbytes
        )

    def _take(self, nbytes: int) -> None:
        self._taken += 1
        self.nbytes += nbytes
