"""The figures of a study, all computed from its log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from stoker_goodput.batches import divide
from stoker_scheduler.core.elastic.jobs import replicas_of
from stoker_scheduler.simulation.elastic.profiles import tightest

if TYPE_CHECKING:
    from stoker_scheduler.simulation.elastic.study import JobRow, Log, World
    from stoker_scheduler.simulation.elastic.workloads import WorkloadJob


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of one policy on one workload, or the mean over seeds.

    Completion times (JCT) are from submission to end. ``utilisation`` is the part of all GPU-seconds until
    the last end that jobs held, stalls included. ``worst_fairness`` is the largest finish-time-fairness
    ratio: the completion time, by what the job would take alone with the replicas and batch of its user,
    times the mean contention while it was there (GPUs asked for by GPUs there are, at least 1; Mahajan et
    al., Themis, NSDI 2020). Above 1, sharing made it later than its part of the cluster would have.
    """

    mean_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    makespan_s: float
    restarts: float
    gpu_hours: float
    utilisation: float
    worst_fairness: float
    policy_p95_ms: float


def figures(log: Log, world: World, workload: Sequence[WorkloadJob]) -> Figures:
    """Return the figures of a study that ended."""
    times = [row.completion_s for row in log.jobs]
    service_gpu_s = sum(row.service_gpu_s for row in log.jobs)
    makespan_s = max(row.finished_s for row in log.jobs)
    p50, p99 = np.percentile(times, (50, 99))
    return Figures(
        mean_jct_s=statistics.fmean(times),
        p50_jct_s=float(p50),
        p99_jct_s=float(p99),
        makespan_s=makespan_s,
        restarts=statistics.fmean(row.restarts for row in log.jobs),
        gpu_hours=service_gpu_s / 3600,
        utilisation=service_gpu_s / (world.gpus * makespan_s),
        worst_fairness=max(fairness(log.jobs, world, workload).values()),
        policy_p95_ms=float(np.percentile(log.policy_s, 95)) * 1000,
    )


def mean_of(seeds: Sequence[Figures]) -> Figures:
    """Return the mean of each figure."""
    names = [field.name for field in fields(Figures)]
    return Figures(
        **{name: statistics.fmean(getattr(one, name) for one in seeds) for name in names}
    )


def fairness(
    finished: Sequence[JobRow], world: World, workload: Sequence[WorkloadJob]
) -> Mapping[str, float]:
    """Return the finish-time-fairness ratio of each job that has finished."""
    rows = {job.name: job for job in workload}
    ends = sorted({time for one in finished for time in (one.submitted_s, one.finished_s)})
    index = {time: place for place, time in enumerate(ends)}
    asked = np.zeros(len(ends))
    for one in finished:
        replicas = rows[one.job].replicas
        asked[index[one.submitted_s] : index[one.finished_s]] += replicas
    widths = np.diff(ends, append=ends[-1])
    contended = np.cumsum(np.maximum(1.0, asked / world.gpus) * widths)
    found = {}
    for one in finished:
        begin, end = index[one.submitted_s], index[one.finished_s]
        before = contended[begin - 1] if begin else 0.0
        mean = (contended[end - 1] - before) / one.completion_s
        found[one.job] = one.completion_s / (_alone_s(rows[one.job], world) * mean)
    return found


def _alone_s(job: WorkloadJob, world: World) -> float:
    """Return how long a job takes by itself with the replicas and batch of its user, after one stall.

    On GPUs of the fastest type.
    """
    model, placement = job.model, tightest(job.replicas, world.whole_node)
    batch = divide(job.batch, job.replicas, model.limits)
    speed = max((one.speed for one in world.types), default=1.0)
    times = model.step_time(placement, batch.local).at_speed(speed)
    step_s = times.whole_s(batch.accumulated)
    total, seconds, before = batch.total(job.replicas), 0.0, 0.0
    for epoch, goal in enumerate(model.goals):
        gain = float(model.noise(epoch, total).gain(total / model.limits.min_batch))
        seconds += (float(goal) - before) * step_s / gain
        before = float(goal)
    start_s = world.start_s
    if start_s is None:
        start_s = world.restart_by_model.get(model.name, world.restart_s)
    return start_s + seconds


def allocated_over_time(log: Log) -> tuple[list[int], dict[str, list[int]]]:
    """Return the times of the rounds, and for each model how many GPUs its jobs have in each."""
    models = {row.job: row.model for row in log.jobs}
    times = sorted({row.at_s for row in log.rounds})
    place = {time: index for index, time in enumerate(times)}
    found = {model: [0] * len(times) for model in sorted(set(models.values()))}
    for row in log.rounds:
        found[models[row.job]][place[row.at_s]] += replicas_of(row.allocation)
    return times, found
