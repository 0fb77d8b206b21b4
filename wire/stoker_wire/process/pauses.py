"""The pauses of this process: times for which its event loop did not turn, as when it was stopped.

A replica that was stopped finds requests that its clients have sent to another replica meanwhile. To do
them as well would undo what was written since.
"""

from __future__ import annotations

import asyncio

PAUSE_S = 0.8
"""A shorter one is no pause: nobody asks another replica before that."""
_TICK_S = 0.1
_BACKLOG_S = 0.2
"""What came in during a pause is read within this time after it."""


class Pauses:
    """A clock of one event loop that notices when it was not wound."""

    def __init__(self) -> None:
        self._ticked_at_s: float | None = None
        self._ended_at_s = float("-inf")
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to notice pauses of the running loop."""
        self._tick()

    def stop(self) -> None:
        """End it."""
        if self._handle is not None:
            self._handle.cancel()
        self._ticked_at_s = None

    def came_in_one(self, since_s: float) -> bool:
        """Return whether there was a pause since then (loop time), or one ended just before."""
        self._look(asyncio.get_running_loop().time())
        return since_s < self._ended_at_s + _BACKLOG_S

    def since(self, since_s: float) -> bool:
        """Return whether there was a pause since then (loop time)."""
        self._look(asyncio.get_running_loop().time())
        return since_s < self._ended_at_s

    def _look(self, now_s: float) -> None:
        if self._ticked_at_s is not None and now_s - self._ticked_at_s > PAUSE_S:
            self._ended_at_s = now_s
            self._ticked_at_s = now_s

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._look(now_s)
        self._ticked_at_s = now_s
        self._handle = loop.call_later(_TICK_S, self._tick)
