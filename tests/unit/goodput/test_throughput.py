"""Step times: the formula, its limits, and numbers that are none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stoker_goodput.throughput import NAMES, ThroughputParams

PARAMS = ThroughputParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)


def test_a_step_is_the_overlap_of_its_pass_and_its_exchange() -> None:
    passes, network = 0.05 + 0.002 * 64, 0.08 + 0.004 * (8 - 2)
    expected = (passes**1.6 + network**1.6) ** (1 / 1.6)
    assert PARAMS.step_time(2, 8, 64) == pytest.approx(expected)


def test_one_replica_exchanges_nothing_and_two_of_a_node_exchange_within_it() -> None:
    assert PARAMS.step_time(1, 1, 64) == pytest.approx(PARAMS.accumulation_time(64))
    assert PARAMS.network_time(1, 2) == pytest.approx(0.03)
    assert PARAMS.network_time(2, 2) == pytest.approx(0.08)


def test_gamma_is_between_a_sum_and_a_maximum() -> None:
    passes, network = PARAMS.accumulation_time(64), PARAMS.network_time(2, 8)
    assert replace(PARAMS, gamma=1.0).step_time(2, 8, 64) == pytest.approx(passes + network)
    assert replace(PARAMS, gamma=10.0).step_time(2, 8, 64) == pytest.approx(
        max(passes, network), rel=0.08
    )


def test_shapes_broadcast_and_nothing_overflows() -> None:
    times = replace(PARAMS, alpha_n=1e300, gamma=10.0).step_time(
        np.array([[1], [2]]), np.array([[2], [4]]), np.array([8, 16, 32])
    )
    assert times.shape == (2, 3)
    assert np.isfinite(times).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_parameter_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(PARAMS, **{name: value})
