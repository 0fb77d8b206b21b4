"""The threads that move bytes: sending, receiving and checksums, which hold no interpreter lock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TransferThreads:
    """A bounded pool. Work in it is never left behind: a cancelled call waits for its thread."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], abort: Callable[[], None] | None = None) -> T:
        """Return ``work()``. A cancel calls ``abort()``, which must make it end soon, and waits for
        that: it writes to memory that the caller gives back next.
        """
        future = self._pool.submit(work)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if abort is not None:
                abort()
            if not future.cancel():
                await _end_of(waiter)
            raise

    def close(self) -> None:
        """Start no more work; do not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _end_of(waiter: asyncio.Future[T]) -> None:
    while not waiter.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()  # seen: the cancel is what counts
