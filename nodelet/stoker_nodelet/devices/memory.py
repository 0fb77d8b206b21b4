"""The memory and the disks of this machine as they are used now, as far as its cgroup lets us use them.

The first lines of one file of the kernel are read, and three files of each cgroup that has a limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stoker_nodelet.core.memory import Disk, NodeMemory
from stoker_nodelet.devices import limits

_MEMINFO = Path("/proc/meminfo")


def limited_cgroups() -> tuple[Path, ...]:
    """Return the cgroups that we are in and that allow less than the machine has."""
    total = _of_machine(_MEMINFO).total_bytes
    found = ((folder, _of_cgroup(folder)) for folder in limits.memory_cgroups())
    return tuple(folder for folder, one in found if one is not None and one.total_bytes < total)


def node_memory(cgroups: Iterable[Path] = (), meminfo: Path = _MEMINFO) -> NodeMemory:
    """Return the memory of the machine, or of the one of ``cgroups`` that is nearer to its limit."""
    known = [_of_machine(meminfo)]
    for folder in cgroups:
        one = _of_cgroup(folder)
        if one is not None and one.total_bytes < known[0].total_bytes:
            known.append(one)
    return max(known, key=lambda one: one.share)


def _of_machine(meminfo: Path) -> NodeMemory:
    total = 0
    with meminfo.open("rb") as lines:
        for line in lines:
            if line.startswith(b"MemTotal:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith(b"MemAvailable:"):
                return NodeMemory(max(0, total - int(line.split()[1]) * 1024), total)
    return NodeMemory(0, total)


def _of_cgroup(folder: Path) -> NodeMemory | None:
    """Return its use without pages of files that the kernel can drop; None where it has no limit."""
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = limits.read(folder / limit_name), limits.read(folder / used_name)
        if limit and used and limit != "max":
            return NodeMemory(max(0, int(used) - _stat(folder, cached_name)), int(limit))
    return None


def _stat(folder: Path, wanted: str) -> int:
    for line in (limits.read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0


def disk(folder: Path) -> Disk:
    """Return the file system of a folder."""
    status = os.statvfs(folder)
    return Disk(str(folder), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
