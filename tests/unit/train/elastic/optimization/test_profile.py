"""The profile of steps: medians by configuration, and a model that follows them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stoker_goodput.fitting import Observation
from stoker_goodput.throughput import ThroughputParams
from stoker_train.elastic.optimization import StepProfile, StepRow, StepTable
from stoker_train.elastic.optimization.profile import LEAST

TRUE = ThroughputParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)


def fill(
    profile: StepProfile,
    generator: np.random.Generator,
    places: list[tuple[int, int]],
    *,
    steps: int = 40,
    jitter: float = 0.1,
    spikes: float = 0.1,
    slower: float = 1.0,
) -> None:
    """Add steps with noise, and now and then one that took five times as long."""
    for (nodes, replicas), local in itertools.product(places, (16, 64, 128)):
        accumulation = float(TRUE.accumulation_time(local))
        step = float(TRUE.step_time(nodes, replicas, local))
        for _ in range(steps):
            factor = slower * (1 + jitter * generator.standard_normal())
            factor *= 5.0 if generator.random() < spikes else 1.0
            profile.add(nodes, replicas, local, accumulation * factor, step * factor)


PLACES = [(1, 1), (1, 2), (1, 4), (2, 4), (2, 8)]


def test_parameters_predict_what_was_not_measured_within_5_percent(seed: int) -> None:
    profile = StepProfile()
    fill(profile, np.random.default_rng(seed), PLACES, jitter=0.02)
    params = profile.params
    assert params is not None
    for nodes, replicas, local in [(1, 3, 32), (2, 6, 100), (4, 16, 64), (1, 8, 128)]:
        expected = TRUE.step_time(nodes, replicas, local)
        assert params.step_time(nodes, replicas, local) == pytest.approx(expected, rel=0.08)
    assert profile.error < 0.08
    assert profile.max_replicas == 8


def test_it_is_fitted_anew_only_when_a_median_changed_by_more_than_its_error(seed: int) -> None:
    generator = np.random.default_rng(seed)
    profile = StepProfile()
    fill(profile, generator, PLACES[:2], jitter=0.0, spikes=0.0)
    first = profile.params
    assert profile.params is first
    fill(profile, generator, PLACES[:2], jitter=0.002, spikes=0.05)
    assert profile.params is first
    assert profile.fits == 1
    fill(profile, generator, PLACES[:2], slower=1.5, steps=64, jitter=0.01)
    assert profile.params is not first
    assert profile.fits == 2


def test_a_new_configuration_is_fitted_once_it_has_enough_steps() -> None:
    profile = StepProfile()
    for _ in range(LEAST - 1):
        profile.add(1, 1, 8, 0.1, 0.1)
    assert profile.params is None
    assert profile.error == 0.0
    profile.add(1, 1, 8, 0.1, 0.1)
    assert profile.params is not None
    assert len(profile.observations()) == 1


def test_what_was_never_run_is_assumed_to_scale_perfectly() -> None:
    profile = StepProfile()
    for local in (8, 16):
        for _ in range(5):
            profile.add(1, 1, local, 0.01 * local, 0.01 * local)
    params = profile.params
    assert params is not None
    assert params.step_time(4, 16, 16) == pytest.approx(0.16, rel=0.05)
    assert max(params.alpha_r, params.beta_r, params.alpha_n, params.beta_n) < 1e-6


def test_a_table_gives_the_time_of_a_pass_and_of_the_exchange() -> None:
    rows = [
        StepRow(compute_s=0.4, exchange_s=0.1, passes=4, share=64),
        StepRow(compute_s=0.4, exchange_s=0.1, passes=4, share=64),
        StepRow(compute_s=0.48, exchange_s=0.02, passes=4, share=64),
        StepRow(share=0),
    ]
    profile = StepProfile()
    for _ in range(LEAST):
        profile.add_table(StepTable.of(*rows), nodes=2)
    (one,) = profile.observations()
    assert (one.nodes, one.replicas, one.local_batch) == (2, 4, 16)
    assert one.accumulation_s == pytest.approx(0.1)
    assert one.step_s == pytest.approx(0.2), "a pass, and what was waited for"


def test_what_is_no_time_is_left_out() -> None:
    profile = StepProfile()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        profile.add(1, 1, 8, bad, 0.1)
        profile.add(1, 1, 8, 0.1, bad)
    profile.add_table(StepTable.of(StepRow()), nodes=1)
    assert profile.observations() == ()


def test_earlier_jobs_count_until_a_configuration_is_measured() -> None:
    before = [Observation(1, 1, 8, 0.5, 0.5), Observation(1, 2, 8, 0.5, 0.7)]
    profile = StepProfile(before)
    assert profile.params is not None
    assert profile.max_replicas == 2
    for _ in range(LEAST):
        profile.add(1, 1, 8, 0.1, 0.1)
    assert set(profile.observations()) == {Observation(1, 1, 8, 0.1, 0.1), before[1]}


def test_a_profile_goes_on_from_its_state(seed: int) -> None:
    profile, other = StepProfile([Observation(3, 3, 8, 0.5, 0.5)]), StepProfile()
    fill(profile, np.random.default_rng(seed), PLACES)
    other.load_state_dict(profile.state_dict())
    assert other.observations() == profile.observations()
    assert other.params == profile.params
    assert other.max_replicas == profile.max_replicas
