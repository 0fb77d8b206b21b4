"""Retention of unpacked packages and venvs: those used least recently leave, none that is in use.

A folder's time is when it was used last, so that this outlives the nodelet. Owned by ``environments``; what a
living worker uses is used again at each sweep, also for other nodelets with the same folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)
BATCH = 20
"""Folders that one sweep removes at most."""
FRESH_S = 900.0
"""What was used so recently stays, whatever the limits: a worker of it may still be in preparation."""
KINDS = ("packages", "venvs")
_SECTOR = 512


@dataclass(slots=True)
class EnvironmentRetention:
    """The limits of the folders below ``root``; 0 is none."""

    root: Path
    keep_s: float
    max_bytes: int
    fresh_s: float = FRESH_S
    count: int = 0
    nbytes: int = 0

    def sweep(self, in_use: Collection[Path]) -> list[Path]:
        """Enforce the limits, and return what was removed; blocks."""
        now_s = time.time()
        found = [path for kind in KINDS for path in (self.root / kind).glob("*")]
        for path in found:
            if path in in_use:
                touch(path)
        sizes = {path: _disk_bytes(path) for path in found if _is_whole(path)}
        self.count, self.nbytes = len(sizes), sum(sizes.values())
        removed: list[Path] = []
        for used_s, path in sorted((_used_s(path), path) for path in sizes):
            is_old = self.keep_s > 0 and now_s - used_s > self.keep_s
            is_surplus = 0 < self.max_bytes < self.nbytes
            if not (is_old or is_surplus) or len(removed) == BATCH:
                break
            if path in in_use or now_s - used_s < self.fresh_s:
                continue
            _remove(path)
            removed.append(path)
            self.count -= 1
            self.nbytes -= sizes[path]
        if removed:
            _log.info("%s unused packages and venvs were removed", len(removed))
        return removed


def touch(path: Path) -> None:
    """Note that a folder is used now."""
    try:
        os.utime(path)
    except OSError:
        return  # it is not there, or not ours


def _is_whole(path: Path) -> bool:
    return path.is_dir() and path.suffix not in (".partial", ".removed")


def _remove(path: Path) -> None:
    gone = path.with_name(f"{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)  # of one that was killed meanwhile
    try:
        path.rename(gone)
    except OSError as error:
        _log.info("%s cannot be removed: %s", path, error)
        return
    shutil.rmtree(gone, ignore_errors=True)


def _used_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _disk_bytes(folder: Path) -> int:
    nbytes = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                nbytes += os.lstat(os.path.join(parent, name)).st_blocks * _SECTOR
            except OSError:
                continue
    return nbytes
