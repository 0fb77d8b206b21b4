"""Batches: the golden table of Pollux's formulas, and limits that always hold."""

from __future__ import annotations

from random import Random

import pytest

from stoker_goodput.batches import Batch, BatchLimits, best_goodputs, capped, divide
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams

PARAMS = ThroughputParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)
LIMITS = BatchLimits(min_batch=128, max_batch=8192, min_local=1, max_local=256)
NODES, REPLICAS = (1, 1, 1, 2, 4), (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("phi", "expected"),
    [
        (200, [(418.3, 128), (694.2, 128), (1046.1, 168), (1115.0, 328), (1222.6, 544)]),
        (2000, [(418.3, 128), (784.7, 326), (1392.1, 500), (2130.8, 904), (3098.2, 1504)]),
        (20000, [(446.2, 498), (887.1, 498), (1728.6, 984), (3183.4, 1936), (5719.2, 3824)]),
    ],
)
def test_the_golden_table(phi: float, expected: list[tuple[float, int]]) -> None:
    noise = GradientNoise(sqr=1.0, var=phi / 128)
    best = best_goodputs(PARAMS, noise, LIMITS, NODES, REPLICAS)
    found = []
    for index, replicas in enumerate(REPLICAS):
        batch = best.batch(index)
        assert batch is not None
        found.append((round(float(best.goodput[index]), 1), batch.total(replicas)))
    assert found == expected


def test_a_noisy_job_goes_on_to_scale_and_one_with_little_noise_does_not() -> None:
    def gain(phi: float) -> float:
        noise = GradientNoise(sqr=1.0, var=phi / 128)
        goodput = best_goodputs(PARAMS, noise, LIMITS, NODES, REPLICAS).goodput
        return float(goodput[-1] / goodput[-2])

    assert gain(20_000) > 1.7
    assert gain(200) < 1.2


def test_a_batch_keeps_all_limits(seed: int) -> None:
    random = Random(seed)
    for _ in range(300):
        least = random.randint(1, 64)
        limits = BatchLimits(
            random.randint(least, 512), random.randint(512, 8192), least, random.randint(64, 512)
        )
        replicas = random.randint(1, limits.max_replicas)
        nodes = random.randint(1, replicas)
        noise = GradientNoise(sqr=random.uniform(0, 2), var=random.uniform(0, 100))
        best = best_goodputs(PARAMS, noise, limits, (nodes,), (replicas,)).batch(0)
        if best is None:
            continue
        for batch in (
            capped(best, replicas, limits),
            divide(random.uniform(limits.min_batch, limits.max_batch), replicas, limits),
        ):
            assert batch.total(replicas) <= limits.max_batch
            assert batch.local <= limits.max_local
        assert best.local >= limits.min_local


def test_one_replica_accumulates_for_an_estimate_of_the_noise() -> None:
    assert divide(129, 1, LIMITS) == Batch(65, 1)
    assert divide(128, 1, LIMITS) == Batch(128, 0)
    assert divide(2048, 4, LIMITS) == Batch(256, 1)


def test_more_replicas_than_local_batches_have_no_goodput() -> None:
    limits = BatchLimits(64, 256, 64, 128)
    best = best_goodputs(PARAMS, GradientNoise(1.0, 1.0), limits, (2,), (8,))
    assert best.goodput[0] == 0
    assert best.batch(0) is None


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ((64, 32, 1, 8), "min_batch is 64, more than max_batch, 32"),
        ((64, 128, 16, 8), "min_local is 16, more than max_local, 8"),
        ((0, 128, 1, 8), "min_batch is 0"),
        ((1, 4, 8, 16), "min_local is 8, more than max_batch, 4"),
    ],
)
def test_limits_that_no_batch_keeps_are_refused(
    limits: tuple[int, int, int, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        BatchLimits(*limits)
