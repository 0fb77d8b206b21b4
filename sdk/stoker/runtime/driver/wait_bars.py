"""Bars for long waits in a notebook: how many of the objects of a ``get()`` or ``wait()`` are there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker.runtime.driver.progress_bars import Bar, shown_bars

if TYPE_CHECKING:
    from stoker.runtime.driver.wait_notices import DriverWaits, Wait

_DRAW_S = 0.5


class WaitBars:
    """A bar for each wait for several objects that is as long as those with notices, until it ends."""

    def __init__(self, waits: DriverWaits) -> None:
        self._waits = waits
        self._shown: dict[Wait, Bar] = {}

    def tick(self) -> None:
        """Draw the bars again (loop thread)."""
        waits = list(self._waits.current)
        if not waits and not self._shown:
            return
        now_s = time.monotonic()
        for wait in waits:
            last = self._shown.get(wait)
            took_s, shown_s = now_s - wait.began_s, last.took_s if last else 0.0
            is_due = took_s >= self._waits.notice_s and took_s - shown_s >= _DRAW_S
            if wait.total > 1 and is_due and not wait.is_counted:
                self._show(wait, took_s)
        for wait in self._shown.keys() - set(waits):
            bar = self._shown.pop(wait)
            bar.closed = True
            shown_bars().update(wait, bar, wait.cell)

    def _show(self, wait: Wait, took_s: float) -> None:
        done = max(0, wait.total - wait.waiter.missing) if wait.waiter is not None else 0
        bar = Bar(0, done, wait.total, wait.what, "objects", took_s, leave=False)
        self._shown[wait] = bar
        shown_bars().update(wait, bar, wait.cell)
