"""The OOM guard: a worker is ended before the kernel has to choose a victim.

A worker whose lease declares ``memory`` may use that much, together with the processes it started.
When the whole node runs full, the largest task worker is killed (a task can be retried; an actor's
state is lost).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from stoker_nodelet import process_tree
from stoker_nodelet.core import WorkKind
from stoker_nodelet.devices import limits
from stoker_nodelet.workers.workers import Workers

PERIOD_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MonitoredWorker:
    """A worker with its limit; ``limit_bytes`` 0 means that its lease declared none."""

    worker_id: str
    pid: int
    limit_bytes: int
    kind: WorkKind


@dataclass(frozen=True, slots=True)
class Victim:
    """A worker that is to be killed, and why."""

    worker_id: str
    reason: str


@dataclass(slots=True)
class OomGuard:
    """Periodic measurement. ``node_share`` of the node's memory may be used before a worker is killed."""

    workers: Workers
    node_share: float = 0.95

    async def run(self) -> None:
        """Measure for ever, and kill the victims."""
        while True:
            await asyncio.sleep(PERIOD_S)
            monitored = self._monitored()
            if monitored:
                for victim in await asyncio.to_thread(find_victims, monitored, self.node_share):
                    _log.warning("%s: %s", victim.worker_id, victim.reason)
                    if victim.worker_id in self.workers.state.workers:
                        self.workers.kill(victim.worker_id, victim.reason, oom=True)

    def _monitored(self) -> list[MonitoredWorker]:
        state = self.workers.state
        launches = self.workers.processes.launches
        monitored = []
        for lease_id, entry in state.leases.items():
            worker = state.workers.get(entry.worker_id)
            if worker is not None and worker.pid:
                limit = int(launches[lease_id].lease.resources.get("memory", 0))
                monitored.append(MonitoredWorker(worker.worker_id, worker.pid, limit, worker.kind))
        return monitored


def find_victims(monitored: list[MonitoredWorker], node_share: float) -> list[Victim]:
    """Return the workers to kill now; it measures, so call it in a thread."""
    victims = []
    for one in monitored:
        if not one.limit_bytes or _resident(one.pid) <= one.limit_bytes:
            continue  # resident sizes are cheap to read, and never less than proportional ones
        used = process_tree.tree_bytes(one.pid)
        if used > one.limit_bytes:
            victims.append(
                Victim(one.worker_id, f"exceeded memory={one.limit_bytes} bytes (used {used})")
            )
    total = limits.memory_limit_bytes()
    used = used_bytes(total)
    if not victims and used > node_share * total:
        tasks = [one for one in monitored if one.kind is WorkKind.TASK]
        if tasks:
            victim = max(tasks, key=lambda one: (_resident(one.pid), one.worker_id))
            victims.append(
                Victim(
                    victim.worker_id,
                    f"the node is out of memory ({used} of {total} bytes used) and this worker "
                    f"was the largest ({_resident(victim.pid)} bytes)",
                )
            )
    return victims


def _resident(pid: int) -> int:
    return sum(process_tree.rss_bytes(member) for member in (pid, *process_tree.descendants(pid)))


def used_bytes(total: int) -> int:
    """Return the node's memory that is not available to a new process."""
    with open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return max(0, total - int(line.split()[1]) * 1024)
    return 0
