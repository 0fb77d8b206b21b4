"""The policy by itself: exact shares, answers that always hold, and rest where nothing changes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.goodput_policy import (
    Constants,
    GoodputPolicy,
    fair_values,
    outlasts,
    share_out,
)
from stoker_scheduler.core.elastic.jobs import (
    ElasticJob,
    Hints,
    Snapshot,
    check,
    replicas_of,
)
from stoker_scheduler.core.elastic.packing import counts_of
from stoker_scheduler.core.elastic.sia import Sia

LIMITS = BatchLimits(64, 8192, 8, 256)
SCALES = ThroughputParams(0.05, 0.004, 0.06, 0.001, 0.01, 0.0005, 2.0)
NOISY = GradientNoise(sqr=1.0, var=100.0)


def hints(random: Random) -> Hints:
    if random.random() < 0.2:
        return Hints(LIMITS)
    params = replace(SCALES, alpha_n=random.uniform(0.02, 1.0), beta_c=random.uniform(0.001, 0.02))
    noise = GradientNoise(sqr=1.0, var=10 ** random.uniform(-1, 4))
    return Hints(LIMITS, params, noise, random.choice((1, 2, 4, 8, 16)), random.uniform(5, 250))


def jobs_of(random: Random, count: int) -> tuple[ElasticJob, ...]:
    return tuple(
        ElasticJob(
            f"job_{index}",
            submitted_s=float(index),
            service_gpu_s=10 ** random.uniform(0, 6),
            restarts=random.randrange(5),
            min_replicas=random.choice((1, 1, 1, 2, 4)),
            max_replicas=random.choice((4, 16, 64)),
        )
        for index in range(count)
    )


@pytest.mark.parametrize("turn", range(6))
def test_answers_hold_over_rounds_whatever_comes(seed: int, turn: int) -> None:
    random = Random(seed * 10 + turn)
    size = random.choice((1, 3, 4, 8))
    nodes = {f"node-{index}": size for index in range(random.randint(1, 12))}
    policy, known = GoodputPolicy(), {}
    jobs: list[ElasticJob] = []
    for number in range(25):
        now_s = 60.0 * (number + 2)
        jobs = [job for job in jobs if random.random() > 0.1]
        for new in jobs_of(random, random.randint(0, 3)):
            jobs.append(replace(new, job_id=f"{new.job_id}-{number}", submitted_s=now_s))
        for job in jobs:
            if job.job_id not in known or random.random() < 0.2:
                known[job.job_id] = hints(random)
        snapshot = Snapshot(nodes, tuple(jobs))
        answer = policy.allocate(snapshot, known, now_s)
        check(snapshot, answer)
        spanning = [node for one in answer.values() if len(one) > 1 for node, _ in one]
        assert len(set(spanning)) == len(spanning), "two jobs that span nodes share one"
        again = GoodputPolicy().allocate(snapshot, known, now_s)
        assert again == answer, "it depends on what was before"
        jobs = [
            replace(
                job,
                allocation=answer.get(job.job_id, ()),
                restarts=job.restarts + (answer.get(job.job_id, ()) != job.allocation),
                service_gpu_s=job.service_gpu_s + 60 * replicas_of(answer.get(job.job_id, ())),
            )
            for job in jobs
        ]


def test_shares_are_the_best_that_there_are(seed: int) -> None:
    random = Random(seed)
    counts = (1, 2, 4, 8)
    for _ in range(100):
        values = np.array([[random.choice((-np.inf, random.random() * 10)) for _ in counts]
                           for _ in range(random.randint(1, 4))])  # fmt: skip
        gpus = random.randint(1, 16)
        found = share_out(values, counts, gpus)

        def worth(chosen: tuple[int, ...], values: object = values) -> float:
            return sum(
                float(values[row][counts.index(count)])  # type: ignore[index]
                for row, count in enumerate(chosen)
                if count
            )

        every = itertools.product((0, *counts), repeat=len(values))
        best = max(worth(chosen) for chosen in every if sum(chosen) <= gpus)
        assert sum(found) <= gpus
        assert worth(tuple(found)) == pytest.approx(max(best, 0.0))


def test_unchanged_hints_change_nothing() -> None:
    nodes = {f"node-{index}": 4 for index in range(4)}
    policy = GoodputPolicy()
    known = {
        f"job_{index}": Hints(LIMITS, replace(SCALES, alpha_n=0.1 * index), NOISY, 16)
        for index in range(6)
    }
    jobs = tuple(ElasticJob(job_id, 0.0) for job_id in known)
    changes = []
    for number in range(21):
        answer = policy.allocate(Snapshot(nodes, jobs), known, 600.0 + 60 * number)
        changes.append(sum(job.allocation != answer.get(job.job_id, ()) for job in jobs))
        jobs = tuple(
            replace(
                job,
                allocation=answer.get(job.job_id, ()),
                service_gpu_s=job.service_gpu_s + 60 * replicas_of(answer.get(job.job_id, ())),
            )
            for job in jobs
        )
    assert changes[0] == 6
    assert not any(changes[1:]), changes


def test_what_scales_gets_more_and_the_young_goes_first() -> None:
    nodes = {f"node-{index}": 4 for index in range(4)}
    slow = replace(SCALES, alpha_n=5.0)
    known = {"fast": Hints(LIMITS, SCALES, NOISY, 16), "slow": Hints(LIMITS, slow, NOISY, 16)}
    jobs = (ElasticJob("fast", 0.0), ElasticJob("slow", 0.0))
    answer = GoodputPolicy().allocate(Snapshot(nodes, jobs), known, 600.0)
    assert replicas_of(answer["fast"]) > 4 >= replicas_of(answer["slow"])
    known = {name: Hints(LIMITS, SCALES, NOISY, 16) for name in ("old", "young")}
    jobs = (ElasticJob("old", 0.0, service_gpu_s=20 * 3600.0), ElasticJob("young", 0.0))
    answer = GoodputPolicy().allocate(Snapshot(nodes, jobs), known, 600.0)
    assert replicas_of(answer["young"]) > replicas_of(answer["old"])


def test_of_two_jobs_one_outlasts_the_other(seed: int) -> None:
    random = Random(seed)
    jobs = jobs_of(random, 8)
    unsaid = np.full(8, np.inf)
    found = outlasts(jobs, Constants(), unsaid)
    assert found.diagonal().tolist() == [0.0] * 8
    off = ~np.eye(8, dtype=bool)
    assert (found + found.T)[off] == pytest.approx(1.0)
    large = [replace(job, service_gpu_s=1e7) for job in jobs[:2]]
    assert outlasts(large, Constants(), unsaid[:2])[0, 1] == pytest.approx(1.0, abs=1e-3)
    said = np.array([100.0, 200.0, *unsaid[2:]])
    of_known = outlasts(jobs, Constants(), said)
    assert of_known[0, 1] == pytest.approx(16 / 17)
    of_known[:2, :2] = found[:2, :2]
    assert (of_known == found).all(), "it says nothing of the others"


def test_of_declared_jobs_the_one_with_less_left_goes_first() -> None:
    nodes = {f"node-{index}": 4 for index in range(4)}
    one = Hints(LIMITS, SCALES, NOISY, 16, progress=1e6)
    known = {"short": replace(one, done=0.9), "long": replace(one, done=0.2)}
    assert known["long"].left == pytest.approx(4e6)
    assert one.left is None and replace(one, done=0.0).left is None
    jobs = (ElasticJob("long", 0.0), ElasticJob("short", 0.0, service_gpu_s=20 * 3600.0))
    answer = GoodputPolicy().allocate(Snapshot(nodes, jobs), known, 600.0)
    assert replicas_of(answer["short"]) > replicas_of(answer.get("long", ()))


def test_a_job_without_measurements_starts_small_and_one_grows_step_by_step() -> None:
    nodes = {f"node-{index}": 4 for index in range(16)}
    new = ElasticJob("new", 0.0)
    answer = GoodputPolicy().allocate(Snapshot(nodes, (new,)), {"new": Hints(LIMITS)}, 60.0)
    assert replicas_of(answer["new"]) == 4
    known = {"new": Hints(LIMITS, SCALES, NOISY, profiled_replicas=4)}
    answer = GoodputPolicy().allocate(Snapshot(nodes, (new,)), known, 600.0)
    assert replicas_of(answer["new"]) <= 16


def test_nothing_to_share_is_no_error() -> None:
    assert GoodputPolicy().allocate(Snapshot({}, ()), {}, 0.0) == {}
    assert GoodputPolicy().allocate(Snapshot({"node": 4}, ()), {}, 0.0) == {}


def test_counts_are_powers_of_two_and_whole_nodes() -> None:
    assert counts_of({f"n{i}": 4 for i in range(5)}, 4) == (1, 2, 4, 8, 12, 16, 20)
    assert counts_of({f"n{i}": 6 for i in range(2)}, 6) == (1, 2, 6, 12)
    assert counts_of({f"n{i}": 3 for i in range(2)}, 3) == (1, 3, 6)
    assert counts_of({"n0": 1, "n1": 1}, 1) == (1, 2)
    assert counts_of({}, 0) == ()
    many = counts_of({f"n{i}": 8 for i in range(256)}, 8)
    assert many[-1] <= 2048 and len(many) < 60


@pytest.mark.parametrize("fairness", [-1.0, 0.0, 1.0])
def test_fairness_is_a_power_mean_and_exact(fairness: float, seed: int) -> None:
    """Of all ways to share GPUs out, the sum of terms is greatest, as brute force finds it."""
    random = Random(seed)
    counts = np.array([1.0, 2.0, 4.0, 8.0])
    for _ in range(50):
        speedups = np.array(
            [np.cumprod([1.0, *(random.uniform(1.0, 2.0) for _ in range(3))]) for _ in range(3)]
        )
        values = fair_values(speedups, np.ones_like(speedups), counts, 8 / 3, fairness)
        best = max(
            sum(values[i][counts.tolist().index(c)] for i, c in enumerate(chosen) if c)
            for chosen in itertools.product((0, 1, 2, 4, 8), repeat=3)
            if sum(chosen) <= 8
        )
        chosen = share_out(values, [1, 2, 4, 8], 8)
        found = sum(values[i][counts.tolist().index(c)] for i, c in enumerate(chosen) if c)
        assert found == pytest.approx(best)


def test_the_fairer_the_more_for_the_worst_off() -> None:
    speedups = np.array([[1.0, 2.0, 4.0, 8.0], [1.0, 1.2, 1.3, 1.4]])
    counts = np.array([1.0, 2.0, 4.0, 8.0])
    shares = {}
    for fairness in (1.0, -1.0):
        values = fair_values(speedups, np.ones_like(speedups), counts, 4.0, fairness)
        shares[fairness] = share_out(values, [1, 2, 4, 8], 8)
    assert shares[1.0] == [8, 0], "by the sum all goes to the one that scales"
    assert shares[-1.0][1] >= 1, "by the worst off nobody has nothing"


@pytest.mark.parametrize("policy", [GoodputPolicy(), GoodputPolicy(fairness=0.0), Sia()])
@pytest.mark.parametrize("replicas", [(2, 2), (3, 3), (3, 4), (5, 5), (7, 8)])
def test_a_job_begins_whose_least_is_no_usual_count(
    policy: GoodputPolicy | Sia, replicas: tuple[int, int]
) -> None:
    least, most = replicas
    job = ElasticJob("a", 0.0, min_replicas=least, max_replicas=most)
    for size in (3, 4, 8):
        nodes = {f"node-{index}": size for index in range(-(-most // size))}
        snapshot = Snapshot(nodes, (job,))
        answer = policy.allocate(snapshot, {"a": Hints(LIMITS)}, 10.0)
        check(snapshot, answer)
        assert least <= replicas_of(answer["a"]) <= most, (size, answer)
