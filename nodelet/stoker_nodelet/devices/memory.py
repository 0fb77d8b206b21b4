"""The memory and the disks of this machine as they are used now, as far as its cgroup lets us use them.

A few small files of the kernel are read: some tens of microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stoker_nodelet.core.memory import Disk, NodeMemory
from stoker_nodelet.devices import limits

_MEMINFO = Path("/proc/meminfo")


def node_memory(cgroups: Iterable[Path] | None = None, meminfo: Path = _MEMINFO) -> NodeMemory:
    """Return the memory of the machine, or of a cgroup that we are in and that is nearer to its limit."""
    known = [_of_machine(meminfo)]
    for folder in limits.memory_cgroups() if cgroups is None else cgroups:
        one = _of_cgroup(folder)
        if one is not None and one.total_bytes < known[0].total_bytes:
            known.append(one)
    return max(known, key=lambda one: one.share)


def _of_machine(meminfo: Path) -> NodeMemory:
    values = {}
    for line in (limits.read(meminfo) or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            values[name] = int(value.split()[0]) * 1024
    total = values.get("MemTotal", 0)
    return NodeMemory(total - values.get("MemAvailable", total), total)


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
