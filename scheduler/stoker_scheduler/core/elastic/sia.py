"""The policy ``sia``: normalised goodputs of a few configurations, of which the best sum is chosen exactly.

The rules of Sia (Jayaram Subramanya et al., SOSP 2023, section 3) for one type of GPU: each job's goodputs
are divided by its least one, and the sum of their powers p = -0.5 is minimised, with ``UNSERVED`` for each
job that gets nothing and ``CHANGED`` for each that is moved. Its integer program has one constraint, the
number of GPUs, so dynamic programming has the same optimum. A job starts with one GPU, and doubles at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stoker_scheduler.core.elastic.goodput_policy import share_out
from stoker_scheduler.core.elastic.jobs import replicas_of
from stoker_scheduler.core.elastic.packing import counts_of, counts_with, pack, usable
from stoker_scheduler.core.elastic.speedups import SpeedupTables

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats
    from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Hints, Snapshot

POWER = -0.5
UNSERVED, CHANGED = 1.1, 0.01
GROWTH = 2


@dataclass(slots=True)
class Sia:
    """Shares GPUs out by normalised goodputs."""

    _tables: SpeedupTables = field(default_factory=SpeedupTables)

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return the allocation of each job that is to have GPUs."""
        jobs, size = snapshot.jobs, snapshot.node_size
        counts = counts_with(snapshot.nodes, size, jobs)
        if not jobs or not counts:
            return {}
        regular = counts_of(snapshot.nodes, size)
        self._tables.keep(job.job_id for job in jobs)
        values = np.array(
            [self._values(job, hints[job.job_id], counts, regular, size, now_s) for job in jobs]
        )
        chosen = share_out(values, counts, snapshot.gpus)
        return pack(
            snapshot.nodes,
            {job.job_id: job for job in jobs},
            {job.job_id: count for job, count in zip(jobs, chosen, strict=True) if count},
            size,
        )

    def _values(
        self,
        job: ElasticJob,
        hints: Hints,
        counts: tuple[int, ...],
        regular: tuple[int, ...],
        size: int,
        now_s: float,
    ) -> Floats:
        """Return what each count saves of the objective; minus infinity where it may not be had."""
        replicas = np.array(counts, dtype=np.float64)
        speedups = self._tables.of(job.job_id, hints, counts, size)
        most = GROWTH * hints.profiled_replicas
        if speedups is None:
            speedups, most = replicas, 1
        may_have = np.array(usable(job, counts, regular), dtype=bool)
        least = replicas[may_have].min(initial=np.inf)
        allowed = may_have & (replicas <= max(most, least)) & (speedups > 0)
        if not allowed.any():
            return np.full(len(counts), -np.inf)
        present = replicas == replicas_of(job.allocation)
        normal = speedups / speedups[allowed].min()
        if job.allocation:
            lost_s = hints.restart_s * job.restarts
            kept = max(0.0, job.age_s(now_s) - lost_s) / (job.age_s(now_s) + hints.restart_s)
            normal = np.where(present, normal, normal * max(kept, 1e-3))
        costs = np.maximum(normal, 1e-6) ** POWER + np.where(present, 0.0, CHANGED)
        return np.where(allowed, np.maximum(UNSERVED - costs, 1e-9), -np.inf)
