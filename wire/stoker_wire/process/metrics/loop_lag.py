"""The lag of an event loop: how much later than due its timers run."""

from __future__ import annotations

import asyncio
from collections import deque

from stoker_wire.process.metrics.distribution import LATENCY_BOUNDS, Distribution

_EVERY_S = 0.5
_RECENT = 20


class LoopLag:
    """Measurement of the running loop, twice a second."""

    def __init__(self) -> None:
        self.seconds = Distribution(LATENCY_BOUNDS)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def recent_s(self) -> float:
        """The longest lag of the last ten seconds."""
        return max(self._recent, default=0.0)

    def start(self) -> None:
        """Begin to measure."""
        self._set()

    def stop(self) -> None:
        """End it."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._measure, due_s)

    def _measure(self, due_s: float) -> None:
        lag_s = max(0.0, asyncio.get_running_loop().time() - due_s)
        self.seconds.observe(lag_s)
        self._recent.append(lag_s)
        self._set()
