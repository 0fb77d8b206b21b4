"""The worth of larger batches: between nothing and all, also at the ends."""

from __future__ import annotations

import math
from random import Random

import pytest

from stoker_goodput.efficiency import GradientNoise


def test_a_gain_is_between_one_and_the_scale(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        noise = GradientNoise(sqr=10 ** random.uniform(-6, 6), var=10 ** random.uniform(-6, 6))
        scale = random.uniform(1, 1000)
        assert 1 - 1e-9 <= noise.gain(scale) <= scale * (1 + 1e-9)
        phi, batch = noise.noise_scale(32), 32 * scale
        assert noise.efficiency(scale) == pytest.approx((phi + 32) / (phi + batch))


def test_without_noise_a_step_is_one_step_and_with_nothing_else_it_is_all_of_its_batch() -> None:
    assert GradientNoise(sqr=1.0, var=0.0).gain(8.0) == 1.0
    assert GradientNoise(sqr=0.0, var=1.0).gain(8.0) == pytest.approx(8.0)
    assert GradientNoise(sqr=0.0, var=1.0).noise_scale(32) == math.inf
    assert GradientNoise(sqr=0.0, var=0.0).gain(8.0) == 1.0, "nothing is known: no gain"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_statistic_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="var"):
        GradientNoise(sqr=1.0, var=value)
    with pytest.raises(ValueError, match="sqr"):
        GradientNoise(sqr=value, var=1.0)
