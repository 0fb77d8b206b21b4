"""The policy ``pollux``: the harmonic mean of speedups over a fair share, by a genetic algorithm.

The rules of Pollux (Qiao et al., OSDI 2021, section 4.2) as its simulator study applied them, to compare
with. A solution is a matrix of replicas, jobs by nodes. NSGA-II (Deb et al., 2002) keeps those that no other
beats in both fitness and utility; of these the one of the best fitness is taken. The non-dominated ones are
where the next round begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker_goodput.batches import best_goodputs
from stoker_goodput.throughput import Floats

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Hints, Snapshot

Solutions = NDArray[np.int16]
"""Replicas by solution, job and node."""

POPULATION, GENERATIONS = 100, 100
CROSSOVER, TO_PRESENT, ROW, ELEMENT = 0.9, 0.1, 0.1, 0.1
POWER, OFFSET = -1.0, 1e-3
GROWTH = 2


@dataclass(slots=True)
class Pollux:
    """Shares GPUs out by evolution, from a seed."""

    seed: int = 0
    _random: np.random.Generator = field(init=False)
    _best: dict[str, Solutions] = field(default_factory=dict)
    """The rows of each job in the non-dominated solutions of the round before, by solution and node."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return the allocation of each job that is to have GPUs."""
        if not snapshot.jobs:
            self._best = {}
            return {}
        jobs = sorted(snapshot.jobs, key=lambda job: (job.service_gpu_s, job.submitted_s))
        names = list(snapshot.nodes)
        round_ = _Round.of(snapshot, jobs, hints, now_s)
        solutions = self._evolve(round_, self._begin(jobs, round_.present))
        scores = round_.scores(solutions)
        front = solutions[_fronts(scores) == 0]
        best = front[np.argmax(round_.scores(front)[:, 0])]
        self._best = {job.job_id: front[:, index] for index, job in enumerate(jobs)}
        found = {}
        for job, row in zip(jobs, best, strict=True):
            allocation = tuple(
                (name, int(count)) for name, count in zip(names, row, strict=True) if count
            )
            if allocation:
                found[job.job_id] = allocation
        return found

    def _begin(self, jobs: list[ElasticJob], present: Solutions) -> Solutions:
        """Return the solutions of the round before, with nothing for new jobs; at first the present one."""
        known = [self._best[job.job_id] for job in jobs if job.job_id in self._best]
        if not known or known[0].shape[1] != present.shape[1]:
            return present[None]
        nothing = np.zeros_like(known[0])
        rows = [self._best.get(job.job_id, nothing) for job in jobs]
        return np.unique(np.stack(rows, axis=1), axis=0)

    def _evolve(self, round_: _Round, solutions: Solutions) -> Solutions:
        scores = round_.scores(solutions)
        for _ in range(GENERATIONS - 1):
            parents = self._tournament(scores)
            children = self._cross(solutions[parents[0]], solutions[parents[1]])
            children = round_.repair(self._mutate(children, round_), self._random)
            solutions = np.unique(np.concatenate((solutions, children)), axis=0)
            scores = round_.scores(solutions)
            kept = _survivors(scores)
            solutions, scores = solutions[kept], scores[kept]
        return solutions

    def _tournament(self, scores: Floats) -> NDArray[np.intp]:
        """Return the parents, as pairs: of two at random the less dominated one, then the less crowded."""
        fronts = _fronts(scores)
        crowding = _crowding(scores, fronts)
        drawn = self._random.integers(len(scores), size=(2, POPULATION, 2))
        first, second = drawn[..., 0], drawn[..., 1]
        better = (fronts[first] < fronts[second]) | (
            (fronts[first] == fronts[second]) & (crowding[first] >= crowding[second])
        )
        return np.where(better, first, second)

    def _cross(self, one: Solutions, other: Solutions) -> Solutions:
        """Return children that have their first rows of one parent and the others of another."""
        count, jobs, _ = one.shape
        point = self._random.integers(1, max(jobs, 2), size=count)
        point = np.where(self._random.random(count) < CROSSOVER, point, jobs)
        return np.where((np.arange(jobs)[None] < point[:, None])[:, :, None], one, other)

    def _mutate(self, children: Solutions, round_: _Round) -> Solutions:
        random, (count, jobs, _) = self._random, children.shape
        back = random.random((count, jobs, 1)) < TO_PRESENT
        children = np.where(back, round_.present[None], children)
        cleared = (random.random((count, jobs, 1)) < ROW) & (
            random.random(children.shape) < ELEMENT
        )
        children = np.where(cleared, 0, children)
        free = children.sum(axis=1, keepdims=True) < round_.size
        positive = children > 0
        many = np.maximum(positive.sum(axis=1, keepdims=True), 1)
        picked = random.random(children.shape) < 1 / jobs
        picked |= positive & (random.random(children.shape) < 1 / many)
        grown = random.integers(children, round_.size, endpoint=True)
        return np.where(picked & free, grown, children).astype(np.int16)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round's jobs, in the order of the rows, and what a solution is worth to each."""

    size: int
    present: Solutions
    speedups: Floats
    """By job, nodes and replicas."""
    limits: NDArray[np.int64]
    kept: Floats
    """The part of its speedup that each job keeps if its row changes."""

    @classmethod
    def of(
        cls, snapshot: Snapshot, jobs: list[ElasticJob], hints: Mapping[str, Hints], now_s: float
    ) -> _Round:
        size, gpus = max(snapshot.nodes.values()), snapshot.gpus
        fair = -(-gpus // len(jobs))
        names = list(snapshot.nodes)
        present = np.zeros((len(jobs), len(names)), dtype=np.int16)
        speedups, limits, kept = [], [], []
        for index, job in enumerate(jobs):
            one = hints[job.job_id]
            for name, count in job.allocation:
                present[index, names.index(name)] = count
            most = min(max(GROWTH * one.profiled_replicas, 1), gpus, job.max_replicas)
            limits.append(min(most, one.limits.max_replicas))
            speedups.append(_speedups(one, limits[-1], len(names), size, gpus, fair))
            age_s, restart_s = job.age_s(now_s), one.restart_s
            kept.append(max(age_s - restart_s * job.restarts, 0.0) / (age_s + restart_s))
        return cls(size, present, np.array(speedups), np.array(limits), np.array(kept))

    def scores(self, solutions: Solutions) -> Floats:
        """Return fitness and utility of each solution; more is better."""
        replicas, nodes = solutions.sum(axis=2), (solutions > 0).sum(axis=2)
        speedups = self.speedups[np.arange(len(self.limits))[None], nodes, replicas]
        used = np.maximum((solutions.sum(axis=1) > 0).sum(axis=1), 1)
        utility = speedups.sum(axis=1) / (used * self.size)
        changed = (solutions != self.present[None]).any(axis=2)
        weighed = speedups * np.where(changed, self.kept[None], 1.0) / self.size + OFFSET
        fitness = (weighed**POWER).mean(axis=1) ** (1 / POWER)
        return np.stack((fitness, utility), axis=1)

    def repair(self, solutions: Solutions, random: np.random.Generator) -> Solutions:
        """Return solutions that keep all limits: one job that spans nodes for each node, and capacities."""
        spans = (solutions > 0).sum(axis=2, keepdims=True) > 1
        spanning = (solutions > 0) & spans
        solutions = np.where(spanning & (spanning.cumsum(axis=1) > 1), 0, solutions)
        order = np.argsort(random.random(solutions.shape), axis=2)
        shuffled = np.take_along_axis(solutions, order, axis=2)
        before = shuffled.cumsum(axis=2) - shuffled
        cut = np.clip(self.limits[None, :, None] - before, 0, shuffled)
        np.put_along_axis(solutions, order, cut, axis=2)
        before = solutions.cumsum(axis=1) - solutions
        return np.clip(self.size - before, 0, solutions).astype(np.int16)


def _speedups(
    hints: Hints, most: int, nodes: int, size: int, gpus: int, fair: int
) -> NDArray[np.float64]:
    """Return the speedup over a fair share, by nodes and replicas up to ``most``; 0 for what cannot be."""
    table = np.zeros((nodes + 1, gpus + 1))
    pairs = [
        (n, k) for n in range(1, min(nodes, most) + 1) for k in range(n, min(n * size, most) + 1)
    ]
    if hints.params is None or hints.noise is None:
        for n, k in pairs:
            table[n, k] = k / fair
        return table
    counts: tuple[Any, ...] = tuple(zip((1, fair), *pairs, strict=True))
    goodput = best_goodputs(hints.params, hints.noise, hints.limits, *counts).goodput
    if goodput[0] > 0:
        for (n, k), value in zip(pairs, goodput[1:], strict=True):
            table[n, k] = value / goodput[0]
    return table


def _fronts(scores: Floats) -> NDArray[np.int64]:
    """Return for each solution the number of the front that it is in: 0 is dominated by none."""
    at_least = np.asarray((scores[:, None] >= scores[None]).all(axis=2))
    dominates = np.asarray(at_least & ~at_least.T)
    fronts = np.full(len(scores), -1)
    left, number = dominates.sum(axis=0), 0
    while (fronts < 0).any():
        front = np.flatnonzero((fronts < 0) & (left == 0))
        fronts[front] = number
        left = left - dominates[front].sum(axis=0)
        number += 1
    return fronts


def _crowding(scores: Floats, fronts: NDArray[np.int64]) -> Floats:
    """Return how far the neighbours of each solution in its front are; infinite at the ends."""
    distances = np.zeros(len(scores))
    for number in range(int(fronts.max()) + 1):
        members = np.flatnonzero(fronts == number)
        for objective in scores[members].T:
            order = members[np.argsort(objective, kind="stable")]
            values = np.sort(objective)
            width = values[-1] - values[0]
            distances[order[[0, -1]]] = np.inf
            if width > 0 and len(order) > 2:
                distances[order[1:-1]] += (values[2:] - values[:-2]) / width
    return distances


def _survivors(scores: Floats) -> NDArray[np.intp]:
    """Return the solutions that stay: the first fronts, of the last of them the least crowded."""
    fronts = _fronts(scores)
    crowding = _crowding(scores, fronts)
    return np.lexsort((-crowding, fronts))[:POPULATION]
