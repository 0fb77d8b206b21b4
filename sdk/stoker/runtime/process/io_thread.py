"""The one thread of a runtime that does I/O: its event loop, its background work, and its wake-up.

All that is marked "loop thread" runs here. Other threads leave work in queues of their own and call
:meth:`IoThread.wake`, which costs one wake-up for all that is left until then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from stoker_wire.errors import DeadlineExceededError
from stoker_wire.process.background import Background
from stoker_wire.process.event_loop import new_loop

T = TypeVar("T")
_START_S = 20.0
_JOIN_S = 5.0


class IoThread:
    """The loop thread of this process. Thread-safe where a method does not say "loop thread"."""

    background: Background

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self.running = True
        """False from the moment on at which the runtime ends."""
        self._name = name
        self._wake_scheduled = False
        self._flushes: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; return when it takes work."""
        self._thread = threading.Thread(target=self._serve, name="stoker-io", daemon=True)
        self._thread.start()
        self.run(self._begin(), _START_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _begin(self) -> None:
        self.background = Background(self._name)

    def stop(self) -> None:
        """End the thread and close its loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if not self.loop.is_running():
            self.loop.close()

    def is_current(self) -> bool:
        """Return whether the caller is this thread, which must not block."""
        return threading.current_thread() is self._thread

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` on the loop thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop thread and wait for it. Not from the loop thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            name = getattr(coroutine, "__qualname__", "a call")
            raise DeadlineExceededError(f"{name} passed its deadline of {timeout_s:g} s") from None

    def on_wake(self, *flushes: Callable[[], object]) -> None:
        """Call these on the loop thread, in this order, after each :meth:`wake`."""
        self._flushes += flushes

    def wake(self) -> None:
        """Wake the loop thread to take what other threads left (one wake-up per batch)."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self.loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Take what other threads left (loop thread)."""
        self._wake_scheduled = False
        for flush in self._flushes:
            flush()
