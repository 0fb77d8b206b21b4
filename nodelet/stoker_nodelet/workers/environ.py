"""The environment that the kernel shows of a process, which no ``os.environ`` changes.

A fork server hands its own to all that it forks: ``/proc/self/environ`` of a worker is what the nodelet was
started with. Diagnostics and crash reports print it, so that a secret in it ends in the log of a job.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

_ENV_START, _ENV_END = 50, 51
"""Fields of ``/proc/PID/stat``, counted from 1 as in proc(5)."""


def wipe_initial(names: Collection[str]) -> None:
    """Overwrite the values with which this process was started; those that it forks never have them."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()  # the third and what follows
    at, end = int(fields[_ENV_START - 3]), int(fields[_ENV_END - 3])
    wanted = {name.encode() for name in names}
    for entry in ctypes.string_at(at, end - at).split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in wanted:
            ctypes.memset(at + len(name) + 1, 0, len(value))
        at += len(entry) + 1
