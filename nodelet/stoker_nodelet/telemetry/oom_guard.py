"""The memory guard: ends a worker before the kernel has to choose a victim.

A worker whose lease declares ``memory`` may use that much, together with the processes it started.
When the whole node runs full, the largest task worker goes (a task can be tried again; an actor's
state cannot).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from stoker_nodelet import devices
from stoker_nodelet.workers import process_tree
from stoker_nodelet.workers.workers import Workers
from stoker_wire.messages.cluster import LeaseKind

PERIOD_S = 0.5

_log = logging.getLogger("stoker.nodelet.memory")


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker as the guard sees it; ``limit_bytes`` 0 means that it declared nothing."""

    worker_id: str
    pid: int
    limit_bytes: int
    kind: LeaseKind


@dataclass(frozen=True, slots=True)
class Offender:
    """A worker that is to die, and why."""

    worker_id: str
    reason: str


@dataclass(slots=True)
class MemoryGuard:
    """Measures every half second. ``node_share`` is how full the node may be before work dies."""

    workers: Workers
    node_share: float = 0.95

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            watched = self._watched()
            if watched:
                for offender in await asyncio.to_thread(find_offenders, watched, self.node_share):
                    _log.warning("%s: %s", offender.worker_id, offender.reason)
                    if offender.worker_id in self.workers.state.workers:
                        self.workers.kill(offender.worker_id, offender.reason, oom=True)

    def _watched(self) -> list[Watched]:
        state = self.workers.state
        found = []
        for held in state.leases.values():
            worker = state.workers.get(held.worker_id)
            if worker is not None and worker.pid:
                limit = int(held.lease.resources.get("memory", 0))
                found.append(Watched(worker.worker_id, worker.pid, limit, worker.kind))
        return found


def find_offenders(watched: list[Watched], node_share: float) -> list[Offender]:
    """Return who must die now; measures, so call it in a thread."""
    found = []
    for one in watched:
        if not one.limit_bytes or _resident(one.pid) <= one.limit_bytes:
            continue  # resident sizes are cheap to read, and never less than proportional ones
        used = process_tree.tree_bytes(one.pid)
        if used > one.limit_bytes:
            found.append(
                Offender(one.worker_id, f"exceeded memory={one.limit_bytes} bytes (used {used})")
            )
    total = devices.memory_limit_bytes()
    used = used_bytes(total)
    if not found and used > node_share * total:
        tasks = [one for one in watched if one.kind is LeaseKind.TASK]
        if tasks:
            victim = max(tasks, key=lambda one: (_resident(one.pid), one.worker_id))
            found.append(
                Offender(
                    victim.worker_id,
                    f"the node is out of memory ({used} of {total} bytes used) and this worker "
                    f"was the largest ({_resident(victim.pid)} bytes)",
                )
            )
    return found


def _resident(pid: int) -> int:
    return sum(process_tree.rss_bytes(member) for member in (pid, *process_tree.descendants(pid)))


def used_bytes(total: int) -> int:
    """Return the node's memory that is not available to a new process."""
    with open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return max(0, total - int(line.split()[1]) * 1024)
    return 0
