"""A job's own half: what it measures again is averaged, and fitted only where that says something."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation
from stoker_scheduler.simulation.elastic import agent
from stoker_scheduler.simulation.elastic.agent import Agent

LIMITS = BatchLimits(64, 2048, 16, 256)
NOISE = GradientNoise(sqr=1.0, var=100.0)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many observations each fit had."""
    counts: list[int] = []

    def counted(observations: object, tolerance: float) -> object:
        seen = list(observations)  # type: ignore[call-overload]
        counts.append(len(seen))
        return fit(seen, tolerance)

    fit = agent.fit
    monkeypatch.setattr(agent, "fit", counted)
    return counts


def test_a_configuration_is_the_mean_of_its_measurements(seed: int, fits: list[int]) -> None:
    random, job = Random(seed), Agent(LIMITS)
    for _ in range(400):
        seconds = 0.2 * (1 + random.gauss(0, 0.05))
        job.measured(Observation(1, 1, 64, seconds, seconds), NOISE)
        job.refit()
    assert job.params is not None
    assert float(job.params.step_time(1, 1, 64)) == pytest.approx(0.2, rel=agent.MOVED + 0.01)
    assert set(fits) == {1}
    assert len(fits) <= 12, "the mean settles, and so do the fits"


def test_the_same_time_again_is_no_news(fits: list[int]) -> None:
    job = Agent(LIMITS)
    for _ in range(3):
        for local in (32, 64, 128):
            job.measured(Observation(1, 1, local, 0.1 + local / 1000, 0.1 + local / 1000), NOISE)
            job.refit()
    assert fits == [1, 2], "what two batches say of the third is right"


def test_under_the_rules_of_pollux_the_first_measurement_stays(seed: int, fits: list[int]) -> None:
    random, job = Random(seed), Agent(LIMITS, as_pollux=True)
    times = [0.2 * (1 + random.gauss(0, 0.05)) for _ in range(50)]
    for seconds in times:
        job.measured(Observation(1, 1, 64, seconds, seconds), NOISE)
        job.refit()
    assert job.params is not None
    assert fits == [1]
    assert float(job.params.step_time(1, 1, 64)) == pytest.approx(times[0], rel=0.01)
    assert statistics.fmean(times) != times[0]


def test_what_is_measured_on_slower_gpus_says_what_faster_ones_would_do() -> None:
    job = Agent(LIMITS)
    for replicas in (1, 2, 4):
        for local in (32, 128):
            passes_s, exchange_s = (0.02 + local * 0.001) / 0.4, 0.05 * (replicas > 1)
            job.measured(
                Observation(1, replicas, local, passes_s, passes_s + exchange_s), NOISE, 0.4
            )
            job.refit()
    assert job.params is not None
    assert float(job.params.step_time(1, 2, 64)) == pytest.approx(0.084 + 0.05, rel=0.05)
    assert float(job.params.at_speed(0.4).step_time(1, 2, 64)) == pytest.approx(0.26, rel=0.05)
    assert job.choose(1, 4, 0.4).total(4) <= job.choose(1, 4, 10.0).total(4)
