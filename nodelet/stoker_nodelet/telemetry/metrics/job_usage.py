"""The CPU time and the GPUs that jobs take on this node.

CPU time is read when somebody asks, and at the end of a process; GPUs that a worker holds count by the
time between two ticks of the nodelet.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stoker_wire.process import process_tree
from stoker_wire.process.metrics import BoundedLabel

if TYPE_CHECKING:
    from stoker_nodelet.core import WorkerEntry


class JobUsage:
    """The usage of at most ``max_jobs`` jobs each for itself, since the nodelet started."""

    def __init__(self, max_jobs: int) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.gpu_s: dict[str, float] = defaultdict(float)
        self._label = BoundedLabel(max_jobs, self._forget)
        self._counted_s: dict[str, float] = {}
        """Worker id -> the CPU time that its job was charged with."""
        self._ticked_s: float | None = None

    def _forget(self, job_id: str) -> None:
        self.cpu_s.pop(job_id, None)
        self.gpu_s.pop(job_id, None)

    async def measure(self, workers: Iterable[WorkerEntry]) -> None:
        """Charge the jobs of living workers with the CPU time that these took since.

        That is in a file for each of their threads, so another thread reads: 1.5 ms for 40 of them.
        """
        living = [worker for worker in workers if worker.job_id and worker.pid]
        for worker in living:
            self._counted_s.setdefault(worker.worker_id, 0.0)
        pids = [worker.pid for worker in living]
        found = await asyncio.to_thread(lambda: list(map(process_tree.tree_cpu_s, pids)))
        for worker, cpu_s in zip(living, found, strict=True):
            if worker.worker_id in self._counted_s:  # else it has ended meanwhile, and was charged
                self._charge(worker, cpu_s)

    def ended(self, worker: WorkerEntry, cpu_s: float) -> None:
        """Charge the job of a process that has ended after so much CPU time."""
        if worker.job_id:
            self._charge(worker, cpu_s)
        self._counted_s.pop(worker.worker_id, None)

    def _charge(self, worker: WorkerEntry, cpu_s: float) -> None:
        counted_s = self._counted_s.get(worker.worker_id, 0.0)
        if cpu_s > counted_s:  # what a process leaves that nobody waits for is missing
            self._counted_s[worker.worker_id] = cpu_s
            self.cpu_s[self._label.of(worker.job_id)] += cpu_s - counted_s

    def tick(self, workers: Iterable[WorkerEntry], now_s: float) -> None:
        """Charge the jobs whose workers hold GPUs now, for the time since the last tick."""
        passed_s = now_s - (now_s if self._ticked_s is None else self._ticked_s)
        self._ticked_s = now_s
        for worker in workers:
            if worker.gpus and worker.job_id:
                held = sum(worker.gpus.values()) * passed_s
                self.gpu_s[self._label.of(worker.job_id)] += held
