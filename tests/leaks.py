"""What a test left behind: processes, shared memory and file descriptors.

Every process that a test run starts inherits a marker in its environment: an orphan is found even
after init adopted it, and another run on the same machine is never blamed. Only conftest.py calls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.services import until

MARKER = "STOKER_TEST_RUN"
SHM = Path("/dev/shm")
EXIT_GRACE_S = 30.0
IDLE_S = 75.0
"""A connection that was kept alive has been closed by then: clients keep idle ones for a minute."""
FD_SLACK = 16


def mark_this_run() -> None:
    """Puts the marker where every process started from here on inherits it."""
    os.environ[MARKER] = secrets.token_hex(8)


class Process(NamedTuple):
    """A process, also when its id is another's later."""

    pid: int
    start: int


def _parents() -> dict[Process, int]:
    """Every process that lives, with the id of its parent. Asked twice a test, so by bare system calls."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                file = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except OSError:
                continue
            try:
                stat = os.read(file, 4096)
            except OSError:  # it has ended
                continue
            finally:
                os.close(file)
            state, parent, *rest = stat.rpartition(b") ")[2].split(None, 20)
            if state not in (b"Z", b"X"):
                found[Process(int(name), int(rest[17]))] = int(parent)
    return found


@cache
def _is_marked(process: Process) -> bool:
    """Whether it inherited the marker. Read once per process: two scans a test must be cheap."""
    try:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return f"{MARKER}={os.environ[MARKER]}".encode() in environ


def _processes_of_this_run() -> dict[Process, int]:
    """Our descendants and all that inherited the marker, with the ids of their parents."""
    parents = _parents()
    ours, last = {os.getpid()}, 0
    while len(ours) > last:
        last = len(ours)
        ours.update(process.pid for process, parent in parents.items() if parent in ours)
    ours.remove(os.getpid())
    return {p: parent for p, parent in parents.items() if p.pid in ours or _is_marked(p)}


def _command(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "(ended)"


def _arenas() -> set[str]:
    return {entry.name for entry in SHM.glob("stoker-*")}


def _is_held(name: str) -> bool:
    """Whether the arena's owner lives: then it belongs to another run on this machine."""
    try:
        _, pid, _ = (SHM / name / ".owner").read_text().split()
    except (OSError, ValueError):
        return not (SHM / name).exists()
    return Path(f"/proc/{pid}").exists()


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


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

    processes: frozenset[Process]
    arenas: frozenset[str]
    fds: int

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(_processes_of_this_run()), frozenset(_arenas()), len(_open_files()))

    def leaks(self, fd_slack: int = FD_SLACK) -> list[str]:
        """Descriptions of what is new and outlived the grace period; empty when all is clean."""
        return [*self._processes(), *self._shared_memory(), *self._descriptors(fd_slack)]

    def _processes(self) -> list[str]:
        def extra() -> list[Process]:
            now = _processes_of_this_run()
            return [p for p in now if p not in self.processes and not self._belongs(p, now)]

        try:
            until(lambda: not extra(), EXIT_GRACE_S, "processes end", interval_s=0.02)
        except TimeoutError:
            return [f"process {process.pid}: {_command(process)[:200]}" for process in extra()]
        return []

    def _belongs(self, process: Process, now: dict[Process, int]) -> bool:
        """Whether it descends from a server that was there before, which may keep new workers."""
        parents = {process.pid: parent for process, parent in now.items()}
        before = {process.pid for process in self.processes}
        pid = process.pid
        while pid in parents and pid not in before:
            pid = parents[pid]
        return pid in before

    def _shared_memory(self) -> list[str]:
        def orphans() -> list[str]:
            return sorted(name for name in _arenas() - self.arenas if not _is_held(name))

        try:
            until(lambda: not orphans(), EXIT_GRACE_S, "shared memory is released", interval_s=0.1)
        except TimeoutError:
            return [f"shared memory {SHM / name}" for name in orphans()]
        return []

    def _descriptors(self, slack: int) -> list[str]:
        most = self.fds + slack
        try:
            # Connections to workers close when their leases have been idle for a while, others later.
            until(lambda: len(_open_files()) <= most, IDLE_S, "files close", interval_s=0.1)
        except TimeoutError:
            now = _open_files()
        else:
            return []
        return [f"file descriptors: {self.fds} before, {len(now)} after: {', '.join(sorted(now))}"]
