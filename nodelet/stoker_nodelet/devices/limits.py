"""The CPUs and the memory of this machine, as far as its cgroup lets us use them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stoker_wire.process import process_tree

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.7


def usable_cpus() -> float:
    """Return the CPUs of our affinity mask, or the cgroup's quota if that is smaller."""
    count = float(len(os.sched_getaffinity(0)))
    quota = _cpu_quota()
    return min(count, quota) if quota else count


def _cpu_quota() -> float | None:
    text = read(_own_cgroup("cpu") / "cpu.max") or read(_CGROUP / "cpu.max")
    if text:
        limit, _, period = text.partition(" ")
        return None if limit == "max" else max(1.0, float(limit) / float(period or 100_000))
    limit_us = read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period_us = read(_CGROUP / "cpu/cpu.cfs_period_us")
    if limit_us and period_us and int(limit_us) > 0:
        return max(1.0, int(limit_us) / int(period_us))
    return None


def memory_limit_bytes() -> int:
    """Return the most memory that processes here can have: the cgroup's limit or the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (_own_cgroup("memory") / "memory.max", _CGROUP / "memory.max"):
        text = read(path)
        if text and text != "max":
            total = min(total, int(text))
    for path in (_own_cgroup("memory") / "memory.limit_in_bytes",):
        text = read(path)
        if text:
            total = min(total, int(text))
    return total


def memory_cgroups() -> tuple[Path, ...]:
    """Return the folders of the cgroups that may limit our memory, those above our own among them."""
    own = _own_cgroup("memory")
    return (own, *(folder for folder in own.parents if folder.is_relative_to(_CGROUP)))


def schedulable_memory_bytes() -> int:
    """Return what tasks may declare by default: 70 % of what is available now."""
    available = memory_limit_bytes()
    for line in (read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    return int(available * _MEMORY_SHARE)


def in_use(pid: int) -> bool:
    """Return whether the process, or one that it started, has opened a GPU."""
    return any(_opens_gpu(one) for one in (pid, *process_tree.descendants(pid)))


def _opens_gpu(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"{folder}/{name}").startswith(("/dev/nvidia", "/dev/dxg")):
                    return True
    except PermissionError:
        return True  # it cannot be ruled out
    except OSError:
        return False  # it is gone
    return False


def oom_kills() -> int:
    """Return how often the kernel killed for memory in our cgroup (v2 or v1)."""
    own = _own_cgroup("memory")
    for path in (own / "memory.events", _CGROUP / "memory.events", own / "memory.oom_control"):
        for line in (read(path) or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _own_cgroup(controller: str) -> Path:
    for line in (read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _CGROUP / controller / path.lstrip("/")
    for line in (read(Path("/proc/self/cgroup")) or "").splitlines():
        if line.startswith("0::"):
            return _CGROUP / line[3:].lstrip("/")
    return _CGROUP


def read(path: Path) -> str | None:
    """Return a small file of the kernel without the spaces around; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
