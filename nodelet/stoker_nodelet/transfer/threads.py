"""The threads that move bytes, at a lower priority than the event loop's.

Sending, receiving and checksums release the interpreter's lock, but they fill a core each; niced,
they yield it at once when a control call comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_NICE = 5


class TransferThreads:
    """A bounded pool. Work in it is never left behind: a cancelled call waits for its thread."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield_to_loop)

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


def _yield_to_loop() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
