"""The memory monitor: a worker is stopped before the kernel has to choose a victim.

The loop measures and carries out; :mod:`stoker_nodelet.core.memory` has the rule. A worker is measured
with all that it started. Resident sizes are cheap and never too small; where one matters, the
proportional sizes decide, which count shared pages once. With nothing at work only the node is measured,
once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stoker_nodelet.core import WorkKind
from stoker_nodelet.core.memory import (
    Consumer,
    Loss,
    NodeMemory,
    Watermarks,
    choose,
    over_limit,
    pause_s,
)
from stoker_nodelet.devices import memory
from stoker_nodelet.workers.workers import Workers
from stoker_wire.messages.common import MemoryUse, ProcessMemory
from stoker_wire.process import process_tree

_LARGEST = 5
_DISKS_S = 1.0
_GONE_S = 5.0
"""A worker that was stopped for the node's sake is waited for this long before another is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A worker at work, as it is before its memory is measured."""

    consumer: Consumer
    pid: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A worker that is to be stopped, why, and the numbers."""

    worker_id: str
    reason: str
    memory: MemoryUse
    over_limit: bool


@dataclass(slots=True)
class MemoryMonitor:
    """The monitor of one node. ``threshold`` of the node's memory may be used; with 0 only limits count."""

    workers: Workers
    watermarks: Watermarks
    threshold: float
    period_s: float
    disks: tuple[Path, ...]
    """A folder in each file system that the node writes to."""
    on_change: Callable[[], None]
    """Called when a condition of the node begins or ends."""
    measure: Callable[[], NodeMemory]
    _stopped: str = ""
    _stopped_at_s: float = 0.0
    _disks_at_s: float = 0.0

    async def run(self) -> None:
        """Measure for ever, stop the victims, and note the conditions of the node."""
        while True:
            try:
                wait_s = await self.look()
            except OSError:
                _log.exception("the memory of this node cannot be measured; it is tried again")
                wait_s = _DISKS_S
            await asyncio.sleep(wait_s)

    async def look(self) -> float:
        """Measure once; return the time until that is due again."""
        node = self.measure()
        self._note_conditions(node)
        work = self._work()
        if not work:
            return 4 * self.period_s
        has_limits = any(one.consumer.limit_bytes for one in work)
        is_short = bool(self.threshold) and node.share > self.threshold and not self._waits()
        if has_limits or is_short:
            victims = await asyncio.to_thread(
                find_victims, work, node, self.threshold if is_short else 1.0
            )
            for victim in victims:
                self._stop(victim)
        return pause_s(node, self.threshold or 1.0, self.period_s, has_limits=has_limits)

    def _stop(self, victim: Victim) -> None:
        if victim.worker_id not in self.workers.state.workers:
            return  # it ended by itself meanwhile
        _log.warning("%s: %s", victim.worker_id, victim.reason)
        if not victim.over_limit:
            self._stopped, self._stopped_at_s = victim.worker_id, time.monotonic()
        self.workers.kill(victim.worker_id, victim.reason, memory=victim.memory)

    def _waits(self) -> bool:
        """Return whether the last worker that was stopped for the node's sake may still have its memory."""
        is_there = self._stopped in self.workers.processes.living
        return is_there and time.monotonic() - self._stopped_at_s < _GONE_S

    def _note_conditions(self, node: NodeMemory) -> None:
        changed = self.watermarks.see_memory(node)
        now_s = time.monotonic()
        if now_s - self._disks_at_s >= _DISKS_S:
            self._disks_at_s = now_s
            changed |= self.watermarks.see_disk([memory.disk(path) for path in self.disks])
        if changed:
            reasons = [one for one in (self.watermarks.memory, self.watermarks.disk) if one]
            if reasons:
                _log.warning("this node takes no new work: %s", "; ".join(reasons))
            else:
                _log.info("this node takes new work again")
            self.on_change()

    def _work(self) -> list[Work]:
        state, launches = self.workers.state, self.workers.processes.launches
        found = []
        for lease_id, entry in state.leases.items():
            worker = state.workers.get(entry.worker_id)
            if worker is None or not worker.pid:
                continue
            launch = launches[lease_id]
            lease, actor = launch.lease, launch.spec.actor
            if worker.kind is WorkKind.DRIVER:
                loss = Loss.DRIVER
            elif worker.kind is WorkKind.ACTOR:
                loss = Loss.ACTOR if actor is not None and actor.restartable else Loss.STATE
            else:
                loss = Loss.TASK
            consumer = Consumer(
                worker_id=worker.worker_id,
                loss=loss,
                owner_id=lease.owner_id,
                since_s=lease.granted_at_s or worker.since_s,
                used_bytes=0,
                limit_bytes=int(lease.resources.get("memory", 0)),
                yields=lease.preemptible or lease.background,
            )
            found.append(Work(consumer, worker.pid))
        return found


def find_victims(work: list[Work], node: NodeMemory, threshold: float) -> list[Victim]:
    """Return the workers to stop now; it measures them, so call it in a thread."""
    is_short = node.share > threshold
    measured = []
    for one in work:
        limit = one.consumer.limit_bytes
        if is_short or (limit and _resident(one.pid) > limit):
            used = process_tree.tree_bytes(one.pid)
            measured.append(replace(one.consumer, used_bytes=used))
    victims = [
        (one, f"exceeded memory={one.limit_bytes} bytes (used {one.used_bytes})", True)
        for one in over_limit(measured)
    ]
    if not victims and is_short and (chosen := choose(measured, node, threshold)) is not None:
        reason = (
            f"the node is out of memory ({node.used_bytes} of {node.total_bytes} bytes used, more than "
            f"{threshold:.0%}) and this worker is stopped first (used {chosen.used_bytes})"
        )
        victims = [(chosen, reason, False)]
    if not victims:
        return []
    largest = _largest(work)
    return [
        Victim(
            one.worker_id,
            reason,
            MemoryUse(
                used_bytes=one.used_bytes,
                limit_bytes=one.limit_bytes,
                node_used_bytes=node.used_bytes,
                node_total_bytes=node.total_bytes,
                largest=largest,
            ),
            is_over,
        )
        for one, reason, is_over in victims
    ]


def _resident(pid: int) -> int:
    return sum(process_tree.rss_bytes(member) for member in (pid, *process_tree.descendants(pid)))


def _largest(work: list[Work]) -> tuple[ProcessMemory, ...]:
    """Return the largest processes of the node's work, with their resident sizes."""
    pids = {pid for one in work for pid in (one.pid, *process_tree.descendants(one.pid))}
    sizes = sorted(((process_tree.rss_bytes(pid), pid) for pid in pids), reverse=True)
    return tuple(
        ProcessMemory(pid=pid, nbytes=nbytes, command=process_tree.command(pid))
        for nbytes, pid in sizes[:_LARGEST]
    )
