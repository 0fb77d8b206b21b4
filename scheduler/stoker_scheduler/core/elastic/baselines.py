"""Policies that others are compared with: first come, Tiresias, and Optimus with an oracle.

The last two as in the simulator study of Pollux (OSDI 2021, section 5.3), whose rules they follow to the
second. They keep a job where it is while its number of replicas stays the same, and put the others on the
emptiest nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker_scheduler.core.elastic.jobs import (
    Allocation,
    ElasticJob,
    Hints,
    Snapshot,
    kept,
    replicas_of,
)

TIRESIAS_LIMIT_GPU_S = 16 * 3600.0
"""GPU-seconds after which a job goes to the second queue."""


class Fifo:
    """Jobs in the order of their submission, each with the replicas that it asks for; none overtakes."""

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return what the first jobs ask for, up to the first for which there is no room."""
        left = snapshot.gpus
        running: list[ElasticJob] = []
        for job in snapshot.jobs:
            if job.replicas > left:
                break
            left -= job.replicas
            running.append(job)
        return _place(snapshot, {job.job_id: job.replicas for job in running}, running)


@dataclass(slots=True)
class Tiresias:
    """Discretised least attained service, of two queues, with replicas that users have tuned."""

    _served_s: dict[str, float] = field(default_factory=dict)
    """Seconds that a job has run, the jobs in the order of their arrival."""
    _demoted: dict[str, None] = field(default_factory=dict)
    _at_s: float | None = None

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return what the jobs of the first queue, then those of the second, ask for, as far as it goes."""
        jobs = {job.job_id: job for job in snapshot.jobs}
        interval_s = now_s - (now_s if self._at_s is None else self._at_s)
        self._at_s = now_s
        self._served_s = {job_id: s for job_id, s in self._served_s.items() if job_id in jobs}
        for job in snapshot.jobs:
            known_s = self._served_s.setdefault(job.job_id, 0.0)
            self._served_s[job.job_id] = known_s + (interval_s if job.allocation else 0.0)
            if self._served_s[job.job_id] * job.replicas >= TIRESIAS_LIMIT_GPU_S:
                self._demoted.setdefault(job.job_id)
        first = [jobs[job_id] for job_id in self._served_s if job_id not in self._demoted]
        second = [jobs[job_id] for job_id in self._demoted if job_id in jobs]
        left = snapshot.gpus
        running: list[ElasticJob] = []
        for job in (*first, *second):
            if job.replicas <= left:
                left -= job.replicas
                running.append(job)
        return _place(snapshot, {job.job_id: job.replicas for job in running}, running)


class Optimus:
    """One GPU each, then the next GPU to whom it saves most time, by an oracle of what is left."""

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return an allocation of every GPU that saves time. Raises KeyError for a job without an oracle."""
        left = snapshot.gpus
        counts: dict[str, int] = {}
        for job in snapshot.jobs[:left]:
            counts[job.job_id] = 1
        left -= len(counts)
        gains = {job_id: _gain(hints[job_id], 1, left) for job_id in counts}
        while left:
            job_id = max(gains, key=gains.__getitem__, default="")
            if not job_id or gains[job_id] <= 0:
                break
            counts[job_id] += 1
            left -= 1
            gains[job_id] = _gain(hints[job_id], counts[job_id], left)
        running = [job for job in snapshot.jobs if job.job_id in counts]
        return _place(snapshot, counts, running, order=lambda job: counts[job.job_id])


def _gain(hints: Hints, replicas: int, left: int) -> float:
    """Return the seconds that one replica more saves; 0 where there is none."""
    oracle = hints.oracle
    if oracle is None:
        raise KeyError("Optimus needs an oracle: the steps that each job has left")
    if not left or replicas >= len(oracle.step_s):
        return 0.0
    return (oracle.step_s[replicas - 1] - oracle.step_s[replicas]) * oracle.steps


def _place(
    snapshot: Snapshot,
    counts: Mapping[str, int],
    running: list[ElasticJob],
    order: Callable[[ElasticJob], int] = lambda job: 0,
) -> dict[str, Allocation]:
    """Keep the jobs with as many replicas as before where they are; place the others in ``order``."""
    same = [job for job in running if replicas_of(job.allocation) == counts[job.job_id]]
    allocations, free = kept(snapshot, same)
    others = [job for job in running if job.job_id not in allocations]
    for job in sorted(others, key=order):
        allocations[job.job_id] = free.spread(counts[job.job_id])
    return allocations
