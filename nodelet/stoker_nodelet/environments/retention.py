"""Retention of packages, their pieces and venvs: those used least recently leave, none that is in use.

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
CONDA_SUFFIX = ".conda"
"""Of the folder beside a venv that has the environment of conda below it, and goes with it."""
PACKAGES, PIECES = "packages", "pieces"
KINDS = (PACKAGES, "venvs", PIECES)
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
        with_pieces = {
            self.root / PIECES / one.name for one in in_use if one.parent.name == PACKAGES
        }
        in_use = with_pieces.union(in_use)
        found = [path for kind in KINDS for path in (self.root / kind).glob("*")]
        for path in found:
            if path in in_use:
                touch(path)
        sizes = {path: _nbytes(path) for path in found if _is_whole(path)}
        self.count, self.nbytes = sum(map(_is_counted, sizes)), sum(sizes.values())
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
            self.count -= _is_counted(path)
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
    return path.is_dir() and path.suffix not in (".partial", ".removed", CONDA_SUFFIX)


def _is_counted(path: Path) -> bool:
    """Return whether a folder is one of its own: pieces belong to a package."""
    return path.parent.name != PIECES


def _remove(path: Path) -> None:
    gone = path.with_name(f"{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)  # of one that was killed meanwhile
    try:
        path.rename(gone)
    except OSError as error:
        _log.info("%s cannot be removed: %s", path, error)
        return
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(_below(path), ignore_errors=True)


def _below(path: Path) -> Path:
    return path.with_name(f"{path.name}{CONDA_SUFFIX}")


def _nbytes(path: Path) -> int:
    return _disk_bytes(path) + _disk_bytes(_below(path))


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
                facts = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            # What packages share, as they do pieces, counts once for all of them.
            nbytes += facts.st_blocks * _SECTOR // max(1, facts.st_nlink)
    return nbytes
