"""Waiters: the wake-up of a user's thread, coroutine or callback when objects are settled.

The loop thread notifies a waiter once per entry; the waiter wakes its owner once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from stoker.runtime.process.held_signals import HeldSignals
from stoker_wire.messages.data import Failed, Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.runtime.net.direct_reader import DirectReader
    from stoker.runtime.objects.table import Entry
    from stoker_wire.data.channel import Channel


class Waits(Protocol):
    """The blocking of this process: a driver reports long waits, a worker gives its CPU back meanwhile.

    ``what`` names the user's call that waits for ``entries``.
    """

    def wait(
        self, waiter: ThreadWaiter, timeout_s: float | None, what: str, entries: Sequence[Entry]
    ) -> bool:
        """Wait for objects; return False if the time passed."""

    async def wait_async(
        self, future: asyncio.Future[None], what: str, entries: Sequence[Entry]
    ) -> None:
        """Wait for objects in a coroutine of a user's loop."""

    def why(self, entries: Sequence[Entry], waited_s: float) -> str:
        """Return why objects that were waited for are not there, as the cluster sees it; '' if unknown."""

    def blocked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a wait of the calling thread by other means."""


class ThreadWaiter:
    """A thread that waits until ``missing`` entries have settled. A lock is the cheapest gate."""

    __slots__ = ("_gate", "missing")

    def __init__(self) -> None:
        self.missing = 0
        self._gate = threading.Lock()
        self._gate.acquire()

    def settled(self, location: Location | None = None) -> None:
        """Count one entry that settled (loop thread)."""
        self.missing -= 1
        if self.missing == 0:
            self._gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all have settled; return False if ``timeout_s`` passed first."""
        return self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))


class FailFastWaiter(ThreadWaiter):
    """A thread that waits until all have settled, or one has failed, which is in ``failed`` then."""

    __slots__ = ("failed",)

    def __init__(self) -> None:
        super().__init__()
        self.failed: Failed | None = None

    def settled(self, location: Location | None = None) -> None:
        """Count one entry that settled (loop thread)."""
        if type(location) is Failed and self.missing > 0:
            self.failed = location
            self.missing = 1  # those that settle later find the gate open and leave it alone
        self.missing -= 1
        if self.missing == 0:
            self._gate.release()


class DirectWaiter(FailFastWaiter):
    """A thread that waits for one entry, and reads the channel that brings it by itself if it can."""

    __slots__ = ("_channel", "_reader")

    def __init__(self, reader: DirectReader, channel: Channel) -> None:
        super().__init__()
        self._reader = reader
        self._channel = channel

    def settled(self, location: Location | None = None) -> None:
        """Count the entry, and wake the thread if it is not the one that brought it (loop thread)."""
        super().settled(location)
        self._reader.wake()

    def _is_settled(self) -> bool:
        return self.missing <= 0

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it has settled; return False if ``timeout_s`` passed first."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with HeldSignals() as signals:
            self._reader.read_until(self._channel, self._is_settled, timeout_s, signals)
        if self.missing <= 0:
            return True
        self._reader.demand()
        return super().wait(None if deadline_s is None else deadline_s - time.monotonic())


class LoopWaiter:
    """A coroutine of another loop that waits for one entry."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def settled(self, location: Location | None = None) -> None:
        """Wake the coroutine (the runtime's loop thread)."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Callback:
    """A function to call on the runtime's loop thread."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def settled(self, location: Location | None = None) -> None:
        """Call the function (loop thread)."""
        self._function()


class ValueFuture(concurrent.futures.Future[Any]):
    """A future whose ``result()``, inside a task, gives the CPU back while it waits."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def result(self, timeout: float | None = None) -> Any:
        """Return the value, or raise its error."""
        with self._waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None."""
        with self._waiting():
            return super().exception(timeout)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.done() else self._waits.blocked()
