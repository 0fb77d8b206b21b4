"""The policy ``pollux``: the harmonic mean of speedups over a fair share, by a genetic algorithm.

The rules of Pollux (Qiao et al., OSDI 2021, section 4.2) as its simulator study applied them, to compare
with. A solution is a matrix of replicas, jobs by nodes. NSGA-II (Deb et al., 2002) keeps those that no other
beats in both fitness and utility; of these the one of the best fitness is taken. The non-dominated ones are
where the next round begins.
"""

from __future__ import annotations

from bisect import bisect_right
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
        solutions, scores = self._evolve(round_, self._begin(jobs, round_.present))
        front = solutions[_fronts(scores) == 0]
        best = solutions[np.argmax(scores[:, 0])]
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
        solutions = np.stack(rows, axis=1)
        return solutions[_distinct(solutions, {})]

    def _evolve(self, round_: _Round, solutions: Solutions) -> tuple[Solutions, Floats]:
        """Return the last generation, with its scores."""
        known = dict.fromkeys(_keys(solutions))
        scores = round_.scores(solutions)
        crowding = _crowding(scores, _fronts(scores))
        for _ in range(GENERATIONS - 1):
            parents = self._tournament(scores, crowding)
            children = self._cross(solutions[parents[0]], solutions[parents[1]])
            children = round_.repair(self._mutate(children, round_), self._random)
            children = children[_distinct(children, known)]
            solutions = np.concatenate((solutions, children))
            scores = np.concatenate((scores, round_.scores(children)))
            fronts = _fronts(scores)
            crowding = _crowding(scores, fronts)
            kept = np.lexsort((-crowding, fronts))[:POPULATION]
            solutions, scores, crowding = solutions[kept], scores[kept], crowding[kept]
            keys = list(known)
            known = dict.fromkeys(keys[index] for index in kept.tolist())
        return solutions, scores

    def _tournament(self, scores: Floats, crowding: Floats) -> NDArray[np.intp]:
        """Return the parents, as pairs: of two at random the one that dominates, else the less crowded."""
        drawn = self._random.integers(len(scores), size=(2, POPULATION, 2))
        first, second = drawn[..., 0], drawn[..., 1]
        one, other = scores[first], scores[second]
        at_least, at_most = (one >= other).all(axis=-1), (one <= other).all(axis=-1)
        wins = np.where(at_least == at_most, crowding[first] >= crowding[second], at_least)
        return np.where(wins, first, second)

    def _cross(self, one: Solutions, other: Solutions) -> Solutions:
        """Return children that have their first rows of one parent and the others of another."""
        count, jobs, _ = one.shape
        point = self._random.integers(1, max(jobs, 2), size=count)
        point = np.where(self._random.random(count) < CROSSOVER, point, jobs)
        return np.where((np.arange(jobs)[None] < point[:, None])[:, :, None], one, other)

    def _mutate(self, children: Solutions, round_: _Round) -> Solutions:
        random, (count, jobs, nodes) = self._random, children.shape
        back = random.random((count, jobs)) < TO_PRESENT
        children = np.where(back[:, :, None], round_.present[None], children)
        cleared = np.nonzero(random.random((count, jobs)) < ROW)
        children[cleared] *= random.random((len(cleared[0]), nodes)) >= ELEMENT
        free = children.sum(axis=1, keepdims=True) < round_.size
        positive = children > 0
        often = 1 / np.maximum(positive.sum(axis=1, keepdims=True), 1)
        # Either of two draws picks an element that is positive, one of them any other.
        chance = np.where(positive, 1 / jobs + often - often / jobs, 1 / jobs) * free
        picked = np.nonzero(random.random(children.shape, dtype=np.float32) < chance)
        least = children[picked]
        children[picked] = least + random.random(len(least)) * (round_.size + 1 - least)
        return children


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
        positive = solutions > 0
        spanning = positive & (positive.sum(axis=2, keepdims=True) > 1)
        later = spanning.cumsum(axis=1, dtype=np.int16) > 1
        solutions = np.where(spanning & later, 0, solutions)
        many = np.nonzero(solutions.sum(axis=2) > self.limits)
        rows = solutions[many]
        order = np.argsort(random.random(rows.shape), axis=1)
        shuffled = np.take_along_axis(rows, order, axis=1)
        before = shuffled.cumsum(axis=1) - shuffled
        cut = np.clip(self.limits[many[1], None] - before, 0, shuffled)
        np.put_along_axis(rows, order, cut.astype(np.int16), axis=1)
        solutions[many] = rows
        before = solutions.cumsum(axis=1, dtype=np.int16) - solutions
        return np.clip(self.size - before, 0, solutions)


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


def _keys(solutions: Solutions) -> list[bytes]:
    """Return what tells solutions apart."""
    return [solution.tobytes() for solution in solutions]


def _distinct(solutions: Solutions, known: dict[bytes, None]) -> list[int]:
    """Return the solutions that are new, and add them to those that are known."""
    new = []
    for index, key in enumerate(_keys(solutions)):
        if key not in known:
            known[key] = None
            new.append(index)
    return new


def _fronts(scores: Floats) -> NDArray[np.int64]:
    """Return for each solution the number of the front that it is in: 0 is dominated by none.

    By falling fitness, a solution is in the first front whose last one has less utility: those of the fronts
    before dominate it, and the last of a front has the most utility there (Jensen, 2003, for two objectives).
    """
    order = np.lexsort((-scores[:, 1], -scores[:, 0]))
    fronts = np.zeros(len(scores), dtype=np.int64)
    lowest: list[float] = []
    """Less each front's utility so far, ascending."""
    before, front = None, 0
    for index, (fitness, utility) in zip(order.tolist(), scores[order].tolist(), strict=True):
        if (fitness, utility) != before:
            front = bisect_right(lowest, -utility)
            lowest[front : front + 1] = [-utility]
            before = fitness, utility
        fronts[index] = front
    return fronts


def _crowding(scores: Floats, fronts: NDArray[np.int64]) -> Floats:
    """Return how far the neighbours of each solution in its front are; infinite at the ends."""
    order = np.lexsort((-scores[:, 1], scores[:, 0], fronts))
    fronts, ordered = fronts[order], scores[order]
    first = np.flatnonzero(np.diff(fronts, prepend=-1))
    last = np.append(first[1:], len(fronts)) - 1
    # Within a front utility falls as fitness rises, so one order serves both.
    width = np.abs(ordered[last] - ordered[first])[fronts]
    gaps = np.abs(np.roll(ordered, -1, axis=0) - np.roll(ordered, 1, axis=0))
    found = np.divide(gaps, width, out=np.zeros_like(gaps), where=width > 0).sum(axis=1)
    found[first] = found[last] = np.inf
    distances = np.empty(len(scores))
    distances[order] = found
    return distances
