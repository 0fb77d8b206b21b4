"""Retention of log files: a long one loses its oldest lines, and those of ended processes leave.

Lines are dropped by a hole that is punched into the file: its size and all offsets in it stay, the disk gets
the blocks back, and processes that hold it open (a worker's own children too) notice nothing. What a follower
has not seen is dropped only once it has stood still for :data:`HELD_S`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from stoker_nodelet.telemetry.logs import LogFile, Logs, mark_before

_log = logging.getLogger(__name__)
HELD_S = 30.0
"""How long what follows it waits for a reader that does not move, and the first output for a reader."""
SWEEP_S = 5.0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_LINE_BYTES = 1 << 16
_IN_FLIGHT_BYTES = 4 << 20
_SECTOR = 512


@dataclass(slots=True)
class LogRetention:
    """The limits of the logs in one folder; 0 is none."""

    folder: Path
    logs: Logs
    max_bytes: int
    total_bytes: int
    max_files: int
    sweep_s: float = SWEEP_S
    _swept_at_s: float = 0.0
    _services: dict[Path, LogFile] = field(default_factory=dict)
    _can_punch: bool = True

    def tick(self) -> None:
        """Enforce the limits: of the size of each file always, of their number every ``sweep_s``."""
        now = time.monotonic()
        sweeps = now - self._swept_at_s >= self.sweep_s
        if sweeps:
            self._swept_at_s = now
            self._remove_ended(now)
            self._find_services()
        if self.max_bytes and self._can_punch:
            for log in [*self.logs.all(), *self._services.values()]:
                if sweeps or not log.ended:
                    self._shorten(log, now)

    def _find_services(self) -> None:
        """Look for the logs of services and fork servers: all that are of no worker and no driver."""
        for path in self.folder.glob("*.log"):
            if not path.name.startswith(("worker-", "job-")) and path not in self._services:
                self._services[path] = LogFile("", path)

    def _shorten(self, log: LogFile, now: float) -> None:
        size = log.poll()
        if size - log.hole <= self.max_bytes:
            return
        cut, shown = size - self.max_bytes // 2, log.shown(now - HELD_S)
        if (
            shown is not None
        ):  # What was sent last may be lost with its connection, and asked for again.
            cut = min(cut, shown - min(_IN_FLIGHT_BYTES, self.max_bytes // 2))
        if cut <= log.hole:
            return
        try:
            with log.path.open("rb") as file:
                file.seek(cut)
                end_of_line = file.read(_LINE_BYTES).find(b"\n")
        except FileNotFoundError:
            return
        cut += end_of_line + 1  # A line longer than that is cut where it may.
        cut = min(cut, size if shown is None else shown)
        log.mark = mark_before(log, cut)
        if self._punch(log.path, cut):
            log.hole = cut

    def _punch(self, path: Path, end: int) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        offsets = (ctypes.c_int64(0), ctypes.c_int64(end))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # It was removed.
            return False
        try:
            failed = libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *offsets)
        finally:
            os.close(fd)
        if failed:
            code = ctypes.get_errno()
            self._can_punch = code not in (errno.EOPNOTSUPP, errno.ENOSYS)
            _log.info("the log %s is not shortened: %s", path, os.strerror(code))
        return not failed

    def _remove_ended(self, now: float) -> None:
        """Remove the oldest logs of ended processes that are beyond the number, or the size of all."""
        sizes = {log.worker_id: _disk_bytes(log.path) for log in self.logs.all()}
        self.logs.nbytes = sum(sizes.values())
        ended = [log for log in self.logs.all() if log.ended]
        surplus = len(ended) - self.max_files if self.max_files else 0
        for log in ended:
            is_large = self.total_bytes and self.logs.nbytes > self.total_bytes
            if surplus <= 0 and not is_large:
                return
            shown = log.shown(now - HELD_S)
            if shown is not None and shown < log.poll():
                continue
            log.path.unlink(missing_ok=True)
            self.logs.remove(log.worker_id)
            surplus -= 1
            self.logs.nbytes -= sizes[log.worker_id]


def _disk_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_blocks * _SECTOR
    except FileNotFoundError:
        return 0
