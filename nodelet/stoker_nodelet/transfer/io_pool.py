"""The threads that move bytes: sending, receiving and checksums, none of which holds the interpreter lock.

Both ends of a node's transfers share one pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class IoPool:
    """A bounded pool of threads. A cancelled call waits for its thread, so no work is left behind."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], abort: Callable[[], None] | None = None) -> T:
        """Return ``work()``, computed in a thread.

        A cancel calls ``abort()``, which must make the work end soon, and waits for its end: the work
        writes to memory that the caller gives back next.
        """
        future = self._pool.submit(work)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if abort is not None:
                abort()
            if not future.cancel():
                await _wait_for_end(waiter)
            raise
        finally:
            # They have the error, whose traceback has this frame: all its callers refer to would live on.
            del future, waiter

    def close(self) -> None:
        """Start no more work; do not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _wait_for_end(waiter: asyncio.Future[T]) -> None:
    while not waiter.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()  # mark it as retrieved: the cancel is what counts
