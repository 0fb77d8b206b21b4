"""Who may move bytes now: a bounded number of chunks at once, and every object in its turn.

Used by both ends of a transfer, each with a ``Turns`` of its own. Small objects have places of
their own, so that they never wait for a large one to get on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_NBYTES = 1 << 20


class Turns:
    """Places for chunks: so many at once for large ones, and as many for small ones."""

    def __init__(self, places: int, nbytes: int) -> None:
        self.places = places
        self._large = _Line(places, nbytes)
        self._small = _Line(places, nbytes)

    @asynccontextmanager
    async def turn(self, flow: str, nbytes: int) -> AsyncIterator[None]:
        """Wait for a place to move ``nbytes``; places go round among ``flow`` s (object ids)."""
        line = self._small if nbytes <= SMALL_NBYTES else self._large
        await line.enter(flow, nbytes)
        try:
            yield
        finally:
            line.leave(nbytes)

    @property
    def nbytes_moving(self) -> int:
        """Bytes of the chunks that have a place."""
        return self._large.nbytes + self._small.nbytes


class _Line:
    """Waits in turn by flow; bounded by a count and by bytes, but one chunk always fits."""

    def __init__(self, places: int, max_nbytes: int) -> None:
        self.nbytes = 0
        self._taken = 0
        self._places = places
        self._max_nbytes = max_nbytes
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def enter(self, flow: str, nbytes: int) -> None:
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(flow, deque()).append((place, nbytes))
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self.leave(nbytes)  # it was given in the moment of the cancel
            else:
                place.cancel()
                self._hand_on()
            raise

    def leave(self, nbytes: int) -> None:
        self._taken -= 1
        self.nbytes -= nbytes
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            flow, queue = next(iter(self._waiting.items()))
            while queue and queue[0][0].cancelled():
                queue.popleft()
            if not queue:
                del self._waiting[flow]
                continue
            place, nbytes = queue[0]
            if not self._fits(nbytes):
                return
            queue.popleft()
            if queue:
                self._waiting.move_to_end(flow)
            else:
                del self._waiting[flow]
            self._take(nbytes)
            place.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self._taken == 0 or (
            self._taken < self._places and self.nbytes + nbytes <= self._max_nbytes
        )

    def _take(self, nbytes: int) -> None:
        self._taken += 1
        self.nbytes += nbytes
