"""The inbox of a worker's main thread: the calls that it runs next, in order.

While it is empty, the main thread reads the channel of its last caller by itself, where the next call is
likely to come from; calls of others are brought by the loop thread.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from stoker.runtime.process.held_signals import HeldSignals

if TYPE_CHECKING:
    from stoker.runtime.net.direct_reader import DirectReader
    from stoker_wire.data.channel import Channel


class CallInbox:
    """The ids of the calls to run."""

    def __init__(self, reader: DirectReader) -> None:
        self._reader = reader
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._signals = HeldSignals()  # not entered: no handler raises outside of user code

    def put(self, task_id: str | None) -> None:
        """Add a call (any thread); None ends the main thread's work."""
        self._queue.put(task_id)
        self._reader.wake()

    def get(self, last_caller: Channel | None) -> str | None:
        """Wait for the next call (main thread)."""
        if last_caller is not None and self._queue.empty():
            self._reader.read_until(last_caller, self._has_calls, None, self._signals)
        return self._queue.get()

    def _has_calls(self) -> bool:
        return not self._queue.empty()
