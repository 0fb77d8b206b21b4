"""Calls of an executor or a pool that are not done: who is told when they end, and by which thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.runtime import current

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker_wire.messages.data import Location


class Told:
    """A waiter that calls a function on the loop thread: it must be short, and wait for nothing."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def settled(self, location: Location | None = None) -> None:
        """Call the function."""
        self._function()


class Outstanding:
    """The number of calls that are not done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._on_done: Callable[[], object] | None = None

    def add(self, ref: ObjectRef[Any]) -> None:
        """Count a call until it ends."""
        with self._changed:
            self._count += 1
        current.runtime().objects.watch((ref,), self)

    def settled(self, location: Location | None = None) -> None:
        """Count one less (the loop thread)."""
        with self._changed:
            self._count -= 1
            if self._count:
                return
            self._changed.notify_all()
            on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done()

    def when_done(self, function: Callable[[], object]) -> None:
        """Call a short function once all have ended, and no more begin."""
        with self._changed:
            if self._count:
                self._on_done = function
                return
        function()

    def wait(self) -> None:
        """Return when all have ended. Inside a task the CPU is given back meanwhile."""
        runtime = current.maybe_runtime()
        if runtime is None or not self._count:
            return  # stoker.shutdown() has ended them
        with runtime.objects.waits.blocked(), self._changed:
            self._changed.wait_for(lambda: not self._count)


class CallbackThread:
    """A thread on which results are loaded and users' callbacks run; started by the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(self._work,), name=self._name, daemon=True
                )
                self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Have the thread do some work (any thread)."""
        self._work.put(work)

    def close(self) -> None:
        """End the thread after what it has."""
        self._work.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, which is closed; nothing happens on that thread itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _serve(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := work.get()) is not None:
        job()
        del job  # it keeps the result alive, and the loop waits long
