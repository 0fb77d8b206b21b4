"""The identity of a host as far as memory is shared, and of a process on it.

Two containers on one machine have different host ids, two processes of one container the same. Used by
nodelets when they register and by runtimes to choose Unix sockets and shared memory over TCP; the
identity of a process by whoever must know whether it still runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Return 16 hex digits that are equal for processes with a common /dev/shm."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    try:
        shm = os.stat("/dev/shm")
        mount = f"{shm.st_dev}:{shm.st_ino}"
    except OSError:
        mount = socket.gethostname()
    return hashlib.sha256(f"{boot}/{mount}".encode()).hexdigest()[:16]


@functools.cache
def pid_namespace() -> str:
    """Return 16 hex digits that are equal for processes among which a pid means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:16]


def start_time(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot; 0 if it is gone or a zombie.

    Together with the pid it identifies a process: pids are used again, the pair is not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19]) if fields[0] not in "ZX" else 0
