"""How a user's thread, coroutine or callback learns that objects are settled.

All waiters are told by the loop thread, one call per entry; each wakes its owner once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class ThreadWaiter:
    """Wakes one thread when ``missing`` entries have settled. A lock is the cheapest gate."""

    __slots__ = ("_gate", "missing")

    def __init__(self) -> None:
        self.missing = 0
        self._gate = threading.Lock()
        self._gate.acquire()

    def settled(self) -> None:
        """One entry settled (loop thread)."""
        self.missing -= 1
        if self.missing == 0:
            self._gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all have settled; False if ``timeout_s`` passed first."""
        return self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))


class LoopWaiter:
    """Wakes one coroutine of another loop."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def settled(self) -> None:
        """The entry settled (the runtime's loop thread)."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Callback:
    """Calls a function on the runtime's loop thread."""

    __slots__ = ("settled",)

    def __init__(self, function: Callable[[], None]) -> None:
        self.settled = function
