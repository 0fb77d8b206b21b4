"""The policy ``stoker``: GPUs to whom they are worth most, of all ways to share them out exactly the best.

What the mean completion time loses by a GPU-second is the delay of those that come after. So each round

1. orders the jobs, softly: ``outlasts[i, j]`` is the probability that j still runs when i ends. Sizes are
   not known. Of small jobs, what has had much service is likely to need much more (heavy tails); of large
   ones, of which there are few, the one that came first is likely to end first. Jobs that have declared
   their epochs are ordered by what is left;
2. prices GPUs: a GPU-second of job i delays ``sum_j outlasts[i, j]`` jobs by ``1 / G`` seconds, and jobs to
   come besides, so its price is ``price_i = delayed * sum_j outlasts[i, j] / G``;
3. values progress: a job that ran by itself at that price would choose the count k that costs least,
   ``cost_i = min_k (1 + price_i * k) / speedup_i(k)`` seconds for a second's work on one GPU. So much is a
   second of its work worth, and with its speedup ``s`` at that count,
   ``value_i(k) = cost_i * s * (speedup_i(k) / s) ** power_i / power_i``: concave, as speeds and sizes are
   estimates; linear for large jobs and those of known size, which take turns;
4. shares out: the counts that maximise the sum of values, by dynamic programming over the GPUs.

A count that differs from the present one is worth less, by what a restart takes of the time that the job
has shown to last. docs/adr/0027 has the measurements by which this was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stoker_scheduler.core.elastic.gpu_types import (
    GpuType,
    pack_types,
    share_out_types,
    types_of,
)
from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Hints, Snapshot, replicas_of
from stoker_scheduler.core.elastic.packing import usable
from stoker_scheduler.core.elastic.speedups import SpeedupTables

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats

_NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the policy, one set for all clusters."""

    power: float = 0.5
    """Of a speedup in its value: near 0 shares evenly, 1 (that of large jobs) prefers the first."""
    delayed: float = 2.0
    """For each job that is there and outlasts another, so many are delayed, those to come included."""
    young_gpu_s: float = 2 * 3600.0
    """Service up to which a job says little of its size."""
    large_gpu_s: float = 24 * 3600.0
    """Service from which on jobs are ordered by their submission."""
    large_sharpness: float = 4.0
    """How sharply that begins."""
    left_sharpness: float = 4.0
    """How sharply jobs that say what is left of them are ordered by that."""
    first_replicas: int = 4
    """The most of a job that has measured nothing, in one node."""
    growth: int = 4
    """The most beyond what a job has run with, as a factor."""
    unseen_network: float = 0.9
    """Part of a speedup across nodes that is believed of a job that never ran across nodes."""
    settled_s: float = 400.0
    """For how long a new allocation is expected to stay."""
    lasting: float = 0.25
    """The time that a job has run for which it is expected to go on, as a part."""


@dataclass(slots=True)
class GoodputPolicy:
    """Shares GPUs out by what they are worth. Remembers nothing but tables that it could compute again.

    With a ``fairness`` p from -1 to 1 it maximises, instead of what delays cost, the power mean of speedups
    over a fair share (:func:`fair_values`): for 1 that is their sum, for -1 it is for the worst off.
    """

    constants: Constants = field(default_factory=Constants)
    fairness: float | None = None
    _tables: SpeedupTables = field(default_factory=SpeedupTables)

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return the allocation of each job that is to have GPUs."""
        jobs, types = snapshot.jobs, types_of(snapshot)
        if not jobs or not types:
            return {}
        values = self.values(snapshot, hints, now_s)
        if len(types) > 1:
            return pack_types(types, jobs, share_out_types(values, types))
        shares = share_out(values, types[0].counts, types[0].gpus)
        return pack_types(types, jobs, [(0, count) for count in shares])

    def values(self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float) -> Floats:
        """Return what each count is worth to each job; minus infinity where it may not have it.

        Rows are jobs, columns the counts of each type of GPUs, the fastest type first. A GPU is worth, and
        costs, as many of the reference as its speed says.
        """
        jobs, constants, types = snapshot.jobs, self.constants, types_of(snapshot)
        self._tables.keep(job.job_id for job in jobs)
        speedups = self.speedups(snapshot, hints)
        counts = np.concatenate([one.speed * np.array(one.counts) for one in types])
        gpus = sum(one.speed * one.gpus for one in types)
        kept = np.array([self._kept(job, hints[job.job_id], types, now_s) for job in jobs])
        if self.fairness is not None:
            return fair_values(speedups, kept, counts, gpus / len(jobs), self.fairness)
        left_s = np.array([self._left_s(job, hints[job.job_id]) for job in jobs])
        prices = constants.delayed * outlasts(jobs, constants, left_s).sum(axis=1) / gpus
        allowed = speedups > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = np.where(allowed, (1 + prices[:, None] * counts) / speedups, np.inf)
            best = costs.argmin(axis=1)
            rows = np.arange(len(jobs))
            alone, cost = speedups[rows, best], costs[rows, best]
            relative = speedups * kept / alone[:, None]
            service = np.array([job.service_gpu_s for job in jobs])
            power = constants.power + (1 - constants.power) * largeness(service, constants)
            power = np.where(np.isfinite(left_s), 1.0, power)
            values = (cost * alone / power)[:, None] * relative ** power[:, None]
        return np.where(allowed, values, _NEVER)

    def speedups(self, snapshot: Snapshot, hints: Mapping[str, Hints]) -> Floats:
        """Return how much faster each job is with each count than on one GPU; 0 where it may not have it."""
        return np.hstack(
            [
                [self._speedups(job, hints[job.job_id], one) for job in snapshot.jobs]
                for one in types_of(snapshot)
            ]
        )

    def _speedups(self, job: ElasticJob, hints: Hints, one: GpuType) -> Floats:
        """Return how much faster a job is with each count of a type than on one GPU of the reference.

        0 where it may not have it.
        """
        constants, size, counts = self.constants, one.size, np.array(one.counts, dtype=np.float64)
        speedups = self._tables.of(job.job_id, hints, one.counts, size, one.speed)
        most = constants.growth * max(hints.profiled_replicas, 1)
        if speedups is None:
            speedups, most = counts * one.speed, min(constants.first_replicas, size)
        elif hints.profiled_replicas <= size:
            speedups = np.where(counts > size, speedups * constants.unseen_network, speedups)
        may_have = np.array(usable(job, one.counts, one.regular), dtype=bool)
        least = counts[may_have].min(initial=np.inf)
        return np.where(may_have & (counts <= max(most, least)), speedups, 0.0)

    def _left_s(self, job: ElasticJob, hints: Hints) -> float:
        """Return how long the rest of a job would take on one GPU; infinite where it has not said."""
        goodput = self._tables.goodput(job.job_id)
        return hints.left / goodput if hints.left is not None and goodput else math.inf

    def _kept(
        self, job: ElasticJob, hints: Hints, types: Sequence[GpuType], now_s: float
    ) -> Floats:
        """Return the part of its speedup that a job keeps with each count: all of it with the present one."""
        restart_s = hints.restart_s
        lasts_s = self.constants.lasting * max(0.0, job.age_s(now_s) - restart_s * job.restarts)
        part = lasts_s / (lasts_s + restart_s) if lasts_s else 0.0
        part *= self.constants.settled_s / (self.constants.settled_s + restart_s)
        replicas = replicas_of(job.allocation)
        return np.array(
            [
                1.0 if not replicas or (count == replicas and one.has(job.allocation)) else part
                for one in types
                for count in one.counts
            ]
        )


def outlasts(jobs: Sequence[ElasticJob], constants: Constants, left_s: Floats) -> Floats:
    """Return, for each pair of jobs, the probability that the second still runs when the first ends.

    With a service of x and y GPU-seconds, ``(y + young) / (x + y + 2 * young)``; the later job where both are
    large; where both say what is left, x and y seconds on one GPU (``left_s``; infinite: not said),
    ``y**4 / (x**4 + y**4)``. Shape (jobs, jobs), with 0 on the diagonal.
    """
    service = np.array([job.service_gpu_s for job in jobs])
    submitted = np.array([job.submitted_s for job in jobs])
    size = service + constants.young_gpu_s
    by_size = size[None, :] / (size[:, None] + size[None, :])
    by_order = np.where(submitted[:, None] < submitted[None, :], 1.0, 0.0)
    large = largeness(np.minimum(service[:, None], service[None, :]), constants)
    found = by_size * (1 - large) + by_order * large
    known = np.isfinite(left_s)
    rest = np.where(known, np.maximum(left_s, 1.0), 1.0) ** constants.left_sharpness
    by_left = rest[None, :] / (rest[:, None] + rest[None, :])
    found = np.where(known[:, None] & known[None, :], by_left, found)
    np.fill_diagonal(found, 0.0)
    return found


def fair_values(
    speedups: Floats, kept: Floats, counts: Floats, share: float, fairness: float
) -> Floats:
    """Return the terms of a power mean of speedups over a fair share, above that of a job without GPUs.

    With x a speedup over that on ``share`` GPUs, or on the fewest that the job may have, the term is
    ``(x**p - 1) / p``, ``log(x)`` for p = 0: their sum is greatest where the power mean is, the objective of
    Pollux (OSDI 2021, section 4.2). A job without GPUs counts as one at a hundredth of its share.
    """
    allowed = speedups > 0
    fitting = np.where(allowed & (counts <= max(share, counts.min())), speedups, 0.0).max(axis=1)
    least = np.where(allowed, speedups, np.inf).min(axis=1)
    fair = np.where(fitting > 0, fitting, least)
    relative = np.maximum(speedups * kept / fair[:, None], UNSERVED)

    def term(x: Floats) -> Floats:
        return np.log(x) if fairness == 0 else np.asarray((x**fairness - 1) / fairness)

    gain = term(relative) - term(np.array(UNSERVED))
    return np.where(allowed, np.maximum(gain, 1e-9), _NEVER)


UNSERVED = 0.01
"""The speedup over its fair share for which a job without GPUs counts."""


def largeness(service_gpu_s: Floats, constants: Constants) -> Floats:
    """Return how far a service is that of a large job, from 0 to 1: half at ``large_gpu_s``."""
    beyond = (service_gpu_s / constants.large_gpu_s) ** constants.large_sharpness
    return np.asarray(beyond / (1 + beyond))


def share_out(values: Floats, counts: Sequence[int], gpus: int) -> list[int]:
    """Return the count of each job, 0 for none, with the greatest sum of values within ``gpus``.

    Exact: ``best[g] = max_k best[g - k] + value(k)``, job by job; the first wins where values are equal.
    """
    best = np.zeros(gpus + 1)
    choices = np.zeros((len(values), gpus + 1), dtype=np.int32)
    for row, choice in zip(values, choices, strict=True):
        before = best.copy()
        for count, value in zip(counts, row, strict=True):
            if value <= 0 or count > gpus:
                continue
            with_it = before[: gpus + 1 - count] + value
            rest, chosen = best[count:], choice[count:]
            better = with_it > rest
            rest[better] = with_it[better]
            chosen[better] = count
    left, found = int(np.argmax(best)), []
    for choice in choices[::-1]:
        found.append(int(choice[left]))
        left -= found[-1]
    return found[::-1]
