"""The choice of a batch: within limits, for a gain, and less after it did not fit."""

from __future__ import annotations

import pytest

from stoker_goodput.batches import Batch, BatchLimits, best_goodputs
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_train.elastic.optimization import BatchChoice

PARAMS = ThroughputParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)
LIMITS = BatchLimits(128, 8192, 1, 256)


def noise(phi: float) -> GradientNoise:
    return GradientNoise(1.0, phi / 128)


@pytest.mark.parametrize(
    ("phi", "nodes", "replicas", "goodput", "total"),
    [
        (200, 1, 1, 418.3, 128),
        (200, 1, 4, 1046.1, 168),
        (2000, 2, 8, 2130.8, 904),
        (20000, 1, 1, 446.2, 498),
        (20000, 4, 16, 5719.2, 3824),
    ],
)
def test_it_is_the_batch_of_the_best_goodput(
    phi: float, nodes: int, replicas: int, goodput: float, total: int
) -> None:
    """A table computed apart from this code (shared/reference, systems-1, A1)."""
    choice = BatchChoice(LIMITS)
    batch = choice.choose(PARAMS, noise(phi), None, nodes, replicas)
    assert batch is not None
    assert batch.total(replicas) == pytest.approx(total, rel=0.02)
    found = choice.goodput(PARAMS, noise(phi), batch, nodes, replicas)
    assert found == pytest.approx(goodput, rel=0.001)
    assert found == pytest.approx(
        float(best_goodputs(PARAMS, noise(phi), LIMITS, [nodes], [replicas]).goodput[0])
    )


def test_a_small_gain_changes_nothing() -> None:
    choice = BatchChoice(LIMITS)
    best = choice.choose(PARAMS, noise(2000), None, 1, 4)
    assert best is not None
    assert choice.choose(PARAMS, noise(2000), best, 1, 4) is None
    for local in range(1, 257):
        current = Batch(local, 0)
        chosen = choice.choose(PARAMS, noise(2000), current, 1, 4)
        gain = choice.goodput(PARAMS, noise(2000), best, 1, 4) / choice.goodput(
            PARAMS, noise(2000), current, 1, 4
        )
        assert (chosen is None) == (gain < 1.05), f"{local=} {gain=}"


def test_a_batch_beyond_the_limits_is_left() -> None:
    assert BatchChoice(LIMITS).choose(PARAMS, noise(2000), Batch(300, 0), 1, 4) is not None


def test_no_batch_is_none() -> None:
    limits = BatchLimits(128, 128, 64, 64)
    assert BatchChoice(limits).choose(PARAMS, noise(200), None, 1, 4) is None


def test_out_of_memory_lowers_the_limit_and_goes_on() -> None:
    choice = BatchChoice(LIMITS)
    assert choice.out_of_memory(256)
    assert choice.limits.max_local == 230
    batch = choice.choose(PARAMS, noise(20000), Batch(256, 0), 1, 1)
    assert batch is not None
    assert batch.local <= 230
    other = BatchChoice(LIMITS)
    other.load_state_dict(choice.state_dict())
    assert other.limits == choice.limits
    while choice.out_of_memory(choice.limits.max_local):
        pass
    assert choice.limits.max_local == choice.limits.min_local == 1
