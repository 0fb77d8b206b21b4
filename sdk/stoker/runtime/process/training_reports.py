"""The reports of training of this process that are not written yet.

``stoker.train.report`` adds from any thread; the loop thread takes them about once a second, and before the
result of a call leaves. Where they cannot go for long, every other one of the older half is left out.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_wire.data.training import TrainingReport

MAX_WAITING = 20_000
MANY = 1000
"""So many at once are written without waiting for the next turn."""

_log = logging.getLogger(__name__)


class WaitingReports:
    """A bounded list of reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[TrainingReport] = []
        self.left_out = 0

    def __bool__(self) -> bool:
        return bool(self._reports)

    def add(self, report: TrainingReport) -> bool:
        """Add a report (any thread); return whether there are now so many that they should be taken."""
        with self._lock:
            self._reports.append(report)
            count = len(self._reports)
            if count > MAX_WAITING:
                self._thin()
        return count % MANY == 0

    def _thin(self) -> None:
        half = MAX_WAITING // 2
        if not self.left_out:
            _log.warning(
                "stoker.train.report(): %d reports wait, as the cluster takes none; every other one "
                "of the older ones is left out from now on",
                MAX_WAITING,
            )
        self.left_out += half // 2
        del self._reports[1:half:2]

    def take(self) -> list[TrainingReport]:
        """Return all reports, and forget them."""
        with self._lock:
            reports, self._reports = self._reports, []
            return reports


REPORTS = WaitingReports()
