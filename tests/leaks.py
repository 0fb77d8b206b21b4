"""What a test left behind: processes, shared memory and file descriptors.

Every process that a test run starts inherits a marker in its environment: an orphan is found even
after init adopted it, and another run on the same machine is never blamed. Only conftest.py calls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.services import until

MARKER = "STOKER_TEST_RUN"
SHM = Path("/dev/shm")
EXIT_GRACE_S = 30.0
FD_SLACK = 16


def mark_this_run() -> None:
    """Puts the marker where every process started from here on inherits it."""
    os.environ[MARKER] = secrets.token_hex(8)


def _processes_of_this_run() -> dict[int, psutil.Process]:
    marked: dict[int, psutil.Process] = {}
    value, me = os.environ.get(MARKER), os.getpid()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid == me:
            continue
        try:
            ours = process.pid in children or process.environ().get(MARKER) == value
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                marked[process.pid] = process
        except psutil.Error:
            continue
    return marked


def _arenas() -> set[str]:
    return {entry.name for entry in SHM.glob("stoker-*")}


def _is_held(name: str) -> bool:
    """Whether the arena's owner lives: then it belongs to another run on this machine."""
    try:
        _, pid, _ = (SHM / name / ".owner").read_text().split()
    except (OSError, ValueError):
        return not (SHM / name).exists()
    return psutil.pid_exists(int(pid))


def _open_files() -> list[str]:
    """What this process has open, but for extents, which a driver keeps warm."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            found.append(os.readlink(entry))
    return [target for target in found if not target.startswith(f"{SHM}/stoker-")]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What existed before a test."""

    pids: frozenset[int]
    arenas: frozenset[str]
    fds: int

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(_processes_of_this_run()), frozenset(_arenas()), len(_open_files()))

    def leaks(self, fd_slack: int = FD_SLACK) -> list[str]:
        """Descriptions of what is new and outlived the grace period; empty when all is clean."""
        return [*self._processes(), *self._shared_memory(), *self._descriptors(fd_slack)]

    def _processes(self) -> list[str]:
        extra = [
            p
            for pid, p in _processes_of_this_run().items()
            if pid not in self.pids and not self._belongs(p)
        ]
        _, alive = psutil.wait_procs(extra, timeout=EXIT_GRACE_S)
        found = []
        for process in alive:
            try:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        return found

    def _belongs(self, process: psutil.Process) -> bool:
        """Whether it descends from a server that was there before, which may keep new workers."""
        try:
            return any(parent.pid in self.pids for parent in process.parents())
        except psutil.Error:
            return True

    def _shared_memory(self) -> list[str]:
        def orphans() -> list[str]:
            return sorted(name for name in _arenas() - self.arenas if not _is_held(name))

        try:
            until(lambda: not orphans(), EXIT_GRACE_S, "shared memory is released", interval_s=0.1)
        except TimeoutError:
            return [f"shared memory {SHM / name}" for name in orphans()]
        return []

    def _descriptors(self, slack: int) -> list[str]:
        now = _open_files()
        if len(now) <= self.fds + slack:
            return []
        return [f"file descriptors: {self.fds} before, {len(now)} after: {', '.join(sorted(now))}"]
