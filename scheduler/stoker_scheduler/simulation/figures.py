"""The figures of a simulation, all computed from its allocation log and from what the cluster has."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker_scheduler.simulation.run import Allocation, What


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some numbers, all 0 for none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    most: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """One queue: its jobs, how long they waited, and its part of the resource-seconds of all queues."""

    name: str
    jobs: int
    waiting_s: Spread
    completion_s: Spread
    share: float
    """Of the most used resource."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of one simulation.

    ``utilisation`` is the fraction of each resource that tasks had, from first submission to last end.
    ``waiting_s`` is from submission to the first task's start, ``completion_s`` (JCT) to the last one's
    end. ``fairness`` is Jain's index of the users' mean slowdowns (completion by the time that the job
    runs): 1 is equal, 1/n is one against all (Jain, Chiu and Hawe, DEC-TR-301, 1984).
    """

    jobs: int
    rejected: int
    tasks: int
    preemptions: int
    makespan_s: float
    utilisation: dict[str, float]
    waiting_s: Spread
    completion_s: Spread
    fairness: float
    queues: tuple[QueueFigures, ...] = ()


@dataclass(slots=True)
class _Job:
    queue: str
    user: str
    submitted_s: float
    started_s: float | None = None
    ended_s: float = 0.0
    ran_s: float = 0.0
    """The longest of its tasks."""
    running: dict[int, float] = field(default_factory=dict)
    before_s: dict[int, float] = field(default_factory=dict)
    """Task -> how long it ran before it was preempted."""


def figures(log: Sequence[Allocation], capacity: Mapping[str, float]) -> Figures:
    """Return the figures of a log; ``capacity`` is what the cluster has in all."""
    jobs: dict[str, _Job] = {}
    used: dict[str, dict[str, float]] = {}
    rejected = tasks = preemptions = 0
    first_s, last_s = (log[0].at_s, log[0].at_s) if log else (0.0, 0.0)
    for one in log:
        match one.what:
            case What.SUBMITTED:
                jobs[one.job_id] = _Job(one.queue, one.user, one.at_s)
            case What.STARTED:
                job = jobs[one.job_id]
                job.running[one.task] = one.at_s
                if job.started_s is None:
                    job.started_s = one.at_s
            case What.ENDED | What.PREEMPTED:
                job = jobs[one.job_id]
                ran_s = one.at_s - job.running.pop(one.task)
                before_s = job.before_s.pop(one.task, 0.0)
                if one.what is What.PREEMPTED:
                    job.before_s[one.task] = before_s + ran_s
                    preemptions += 1
                else:
                    job.ran_s = max(job.ran_s, before_s + ran_s)
                    job.ended_s = last_s = max(last_s, one.at_s)
                    tasks += 1
                of_queue = used.setdefault(one.queue, {})
                for name, amount in one.resources.items():
                    of_queue[name] = of_queue.get(name, 0.0) + amount * ran_s
            case What.REJECTED:
                rejected += 1
    started = [job for job in jobs.values() if job.started_s is not None]
    done = [job for job in started if not job.running and not job.before_s]
    makespan_s = last_s - first_s
    total: dict[str, float] = {}
    for of_queue in used.values():
        for name, amount_s in of_queue.items():
            total[name] = total.get(name, 0.0) + amount_s
    utilisation = {
        name: total.get(name, 0.0) / (has * makespan_s) if has and makespan_s else 0.0
        for name, has in sorted(capacity.items())
    }
    bottleneck = max(utilisation, key=lambda name: utilisation[name], default="")
    return Figures(
        jobs=len(jobs),
        rejected=rejected,
        tasks=tasks,
        preemptions=preemptions,
        makespan_s=makespan_s,
        utilisation=utilisation,
        waiting_s=spread([_waited(job) for job in done]),
        completion_s=spread([job.ended_s - job.submitted_s for job in done]),
        fairness=_fairness(done),
        queues=tuple(
            QueueFigures(
                name=name,
                jobs=len(members),
                waiting_s=spread([_waited(job) for job in members]),
                completion_s=spread([job.ended_s - job.submitted_s for job in members]),
                share=used.get(name, {}).get(bottleneck, 0.0) / (total.get(bottleneck) or 1.0),
            )
            for name, members in sorted(_by_queue(done).items())
        ),
    )


def _waited(job: _Job) -> float:
    assert job.started_s is not None
    return job.started_s - job.submitted_s


def _by_queue(jobs: Sequence[_Job]) -> dict[str, list[_Job]]:
    by_queue: dict[str, list[_Job]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    return by_queue


def _fairness(jobs: Sequence[_Job]) -> float:
    slowdowns: dict[str, list[float]] = {}
    for job in jobs:
        if job.ran_s > 0:
            slowdown = (job.ended_s - job.submitted_s) / job.ran_s
            slowdowns.setdefault(job.user, []).append(slowdown)
    means = [statistics.fmean(of_user) for of_user in slowdowns.values()]
    squares = sum(mean * mean for mean in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else 1.0


def spread(values: Sequence[float]) -> Spread:
    """Return mean and percentiles, the latter by the nearest rank."""
    if not values:
        return Spread()
    ordered = sorted(values)

    def rank(fraction: float) -> float:
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    return Spread(
        len(ordered), statistics.fmean(ordered), rank(0.5), rank(0.95), rank(0.99), ordered[-1]
    )


def usage_over_time(
    log: Sequence[Allocation], name: str, points: int = 500
) -> tuple[list[float], list[float]]:
    """Return times, and how much of a resource tasks have from each to the next (mean), for a plot."""
    if not log:
        return [], []
    first_s, last_s = log[0].at_s, max(one.at_s for one in log)
    width_s = (last_s - first_s) / points or 1.0
    in_use = [0.0] * points
    started: dict[tuple[str, int], float] = {}
    for one in log:
        key = (one.job_id, one.task)
        if one.what is What.STARTED:
            started[key] = one.at_s
        elif one.what in (What.ENDED, What.PREEMPTED):
            _add(
                in_use,
                started.pop(key) - first_s,
                one.at_s - first_s,
                width_s,
                one.resources.get(name, 0.0),
            )
    return [first_s + index * width_s for index in range(points)], in_use


def _add(bins: list[float], begin_s: float, end_s: float, width_s: float, amount: float) -> None:
    """Add ``amount`` from begin to end to the bins, each by the part of it that is covered."""
    index = int(begin_s / width_s)
    while amount and index < len(bins) and index * width_s < end_s:
        covered = min(end_s, (index + 1) * width_s) - max(begin_s, index * width_s)
        bins[index] += amount * covered / width_s
        index += 1
