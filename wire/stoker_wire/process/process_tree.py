"""The process tree under /proc: who descends from whom, and how much memory a tree holds.

The fork server uses it to leave nothing behind, the memory monitor to measure a worker together with the
processes that it started, a worker to interrupt what its task has started. It imports the standard library
only and never waits.

Not psutil: its ``children()`` reads every process of the machine (2.4 ms among 117 processes, against
0.1 ms here, at each exit), and its import would cost the fork server tens of milliseconds and pages.
"""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TRACKER_COMMAND = b"resource_tracker import main"


def children(pid: int) -> list[int]:
    """Return the direct children of ``pid`` (of all its threads), without order."""
    pids: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return pids
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except FileNotFoundError:
            if not os.path.exists(f"/proc/{pid}/task/{thread}"):
                continue
            return _children_by_scan(pid)
        except OSError:
            continue
        pids.extend(map(int, text.split()))
    return pids


def _children_by_scan(pid: int) -> list[int]:
    # Kernels built without CONFIG_PROC_CHILDREN.
    return [child for child, parent in _parents().items() if parent == pid]


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents[int(name)] = int(fields[1])
    return parents


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the command: state, ppid, pgrp, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Return all processes under ``pid``, parents before their children."""
    pids: list[int] = []
    frontier = children(pid)
    while frontier:
        pids.extend(frontier)
        frontier = [grandchild for child in frontier for grandchild in children(child)]
    return pids


def foreground(pid: int, since_s: float) -> list[int]:
    """Return the descendants in the process group of ``pid`` that started at ``since_s`` or later.

    They are what Ctrl-C at a terminal reaches besides ``pid`` itself. ``since_s`` is of ``CLOCK_BOOTTIME``.
    """
    group, since = os.getpgid(pid), int(since_s * _TICKS_PER_S)
    stats = {one: _stat(one) for one in descendants(pid)}
    return [
        one
        for one, fields in stats.items()
        if fields and int(fields[2]) == group and int(fields[19]) >= since
    ]


def start_time(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot; 0 if it is gone or a zombie.

    Together with the pid it names a process for ever: pids are used again, the pair is not.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def command(pid: int) -> str:
    """Return the name of the program that ``pid`` runs; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def rss_bytes(pid: int) -> int:
    """Return the resident memory of one process; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[21]) * _PAGE if fields else 0


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of ``pid``, of all its descendants, and of those that they have waited for."""
    ticks = 0
    for member in (pid, *descendants(pid)):
        fields = _stat(member)
        if fields:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def tree_bytes(pid: int) -> int:
    """Return the memory of ``pid`` and all its descendants, with shared pages counted once.

    Proportional set sizes where the kernel gives them (a forked worker shares most of its pages
    with the fork server), else resident sizes.
    """
    return sum(_proportional_bytes(member) for member in (pid, *descendants(pid)))


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as lines:
            for line in lines:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return rss_bytes(pid)


def is_resource_tracker(pid: int) -> bool:
    """Return whether ``pid`` is a resource tracker of multiprocessing or of loky (joblib).

    It unlinks the shared memory and semaphores that its creators have left, once all of them are
    dead, and ends; killed before that, it leaves them in ``/dev/shm`` for good.
    """
    try:
        return _TRACKER_COMMAND in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def marked(variable: str, value: str) -> list[int]:
    """Return the processes that were started with ``variable=value`` in their environment."""
    wanted = f"{variable}={value}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            pids.append(int(name))
    return pids


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"
