"""The genetic algorithm: solutions that hold, the better ones kept, the same seed the same answer."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic import pollux
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints, Snapshot, check, replicas_of
from stoker_scheduler.core.elastic.pollux import Pollux

if TYPE_CHECKING:
    import pytest

    from stoker_scheduler.core.elastic.jobs import Allocation

LIMITS = BatchLimits(64, 2048, 16, 256)
SCALES = ThroughputParams(0.05, 0.004, 0.06, 0.001, 0.01, 0.0005, 2.0)
NODES = {f"node-{index}": 4 for index in range(4)}


def hints(random: Random) -> Hints:
    if random.random() < 0.3:
        return Hints(LIMITS)
    noise = GradientNoise(sqr=1.0, var=10 ** random.uniform(0, 3))
    params = replace(SCALES, alpha_n=random.uniform(0.02, 0.5))
    return Hints(LIMITS, params, noise, random.choice((1, 2, 4, 8)))


def test_answers_hold_and_are_those_of_the_seed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pollux, "GENERATIONS", 8)

    def play() -> list[dict[str, Allocation]]:
        random = Random(seed)
        policy, known, answers = Pollux(seed), {}, []
        jobs: list[ElasticJob] = []
        for number in range(10):
            now_s = 60.0 * (number + 2)
            jobs = [job for job in jobs if random.random() > 0.2]
            jobs += [
                ElasticJob(f"job_{number}_{index}", now_s - 30, max_replicas=random.choice((1, 16)))
                for index in range(random.randint(0, 3))
            ]
            known = {job.job_id: known.get(job.job_id) or hints(random) for job in jobs}
            snapshot = Snapshot(NODES, tuple(jobs))
            answer = policy.allocate(snapshot, known, now_s)
            check(snapshot, answer)
            spanning = [node for one in answer.values() if len(one) > 1 for node, _ in one]
            assert len(set(spanning)) == len(spanning), "two jobs that span nodes share one"
            for job in jobs:
                most = max(2 * known[job.job_id].profiled_replicas, 1)
                assert replicas_of(answer.get(job.job_id, ())) <= most, "it grew too fast"
            jobs = [replace(job, allocation=answer.get(job.job_id, ())) for job in jobs]
            answers.append(answer)
        return answers

    assert play() == play()


def test_what_scales_gets_the_cluster() -> None:
    known = {
        "fast": Hints(LIMITS, SCALES, GradientNoise(1.0, 1000.0), 16),
        "slow": Hints(
            LIMITS, replace(SCALES, alpha_n=5.0, alpha_r=2.0), GradientNoise(1.0, 1.0), 16
        ),
    }
    jobs = (ElasticJob("fast", 0.0), ElasticJob("slow", 0.0))
    answer = Pollux(1).allocate(Snapshot(NODES, jobs), known, 600.0)
    assert replicas_of(answer["fast"]) > replicas_of(answer["slow"]) >= 1


def test_fronts_are_those_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.integers(0, 6, size=(40, 2)).astype(float)

    def dominates(one: int, other: int) -> bool:
        a, b = scores[one], scores[other]
        return bool((a >= b).all() and (a > b).any())

    left, number = set(range(40)), 0
    expected = [0] * 40
    while left:
        front = {i for i in left if not any(dominates(j, i) for j in left)}
        for index in front:
            expected[index] = number
        left -= front
        number += 1
    assert pollux._fronts(scores).tolist() == expected


def test_crowding_is_the_sum_of_the_gaps_between_neighbours() -> None:
    scores = np.array([(0.0, 10.0), (1.0, 6.0), (4.0, 5.0), (0.0, 3.0), (5.0, 0.0), (0.5, 1.0)])
    fronts = pollux._fronts(scores)
    assert fronts.tolist() == [0, 0, 0, 1, 0, 1]
    found = pollux._crowding(scores, fronts)
    assert np.isinf(found[[0, 3, 4, 5]]).all(), "the ends of a front"
    assert found[[1, 2]].tolist() == [4 / 5 + 5 / 10, 4 / 5 + 6 / 10]


def test_solutions_that_are_known_are_not_new() -> None:
    solutions = np.array([[[1, 0]], [[0, 1]], [[1, 0]]], dtype=np.int16)
    known: dict[bytes, None] = {}
    assert pollux._distinct(solutions, known) == [0, 1]
    assert pollux._distinct(solutions, known) == []


def test_no_jobs_are_no_error() -> None:
    assert Pollux().allocate(Snapshot(NODES, ()), {}, 0.0) == {}
