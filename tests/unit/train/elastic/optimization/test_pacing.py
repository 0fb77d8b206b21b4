"""The pace of the noise's measurement: its cost, and that all ranks have the same."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stoker_train.elastic.optimization import StepRow, StepTable
from stoker_train.elastic.optimization.pacing import BUDGET, MeasurementPace


def table(cost_s: float, step_s: float = 0.1) -> StepTable:
    """The table of a rank that waits for another one, whose numbers count."""
    return StepTable.of(
        StepRow(compute_s=step_s / 4, exchange_s=step_s / 4, noise_s=cost_s / 2),
        StepRow(compute_s=step_s / 2, exchange_s=step_s / 4, data_s=step_s / 4, noise_s=cost_s),
    )


@pytest.mark.parametrize(
    ("cost_s", "every"), [(0.0, 1), (0.0005, 1), (0.002, 4), (0.003, 8), (0.03, 64), (9.0, 64)]
)
def test_a_measurement_takes_no_more_than_its_budget(cost_s: float, every: int) -> None:
    pace = MeasurementPace()
    for number in range(300):
        assert number >= 5 or pace.every == 1  # nothing is known yet
        pace.add(table(cost_s if pace.is_due() else 0.0))
    assert pace.every == every
    due = [number for number in range(every * 3) if pace.is_due(number)]
    assert np.diff(due).tolist() == [every] * (len(due) - 1)


def test_it_keeps_to_the_budget_whatever_the_times(seed: int) -> None:
    generator = np.random.default_rng(seed)
    pace, spent_s, whole_s, changes = MeasurementPace(), 0.0, 0.0, 0
    for number in range(4000):
        step_s = 0.1 * generator.lognormal(0.0, 0.3)
        cost_s = 0.0012 * generator.lognormal(0.0, 0.3) if pace.is_due() else 0.0
        before = pace.every
        pace.add(table(cost_s, step_s))
        if number > 100:
            spent_s, whole_s = spent_s + cost_s, whole_s + step_s
            changes += pace.every != before
    assert spent_s / whole_s < 1.5 * BUDGET
    assert changes < 400


def test_all_ranks_measure_at_the_same_steps_also_one_that_joins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    old, joined = MeasurementPace(), MeasurementPace()
    joins = int(generator.integers(3, 150))
    dues = 0
    for number in range(200):
        if number == joins:
            joined.load_state_dict(json.loads(json.dumps(old.state_dict())))
        cost_s = float(generator.uniform(0.0, 0.01)) if old.is_due() else 0.0
        tables = table(cost_s, float(generator.uniform(0.05, 0.5)))
        old.add(tables)
        if number >= joins:
            joined.add(tables)
            assert (joined.every, joined.is_due()) == (old.every, old.is_due())
        dues += old.is_due()
    assert dues < 200
