"""The noise scale from tables of steps, against gradients of a known distribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stoker_train.elastic.optimization import NoiseScale, StepRow, StepTable
from stoker_train.elastic.optimization.noise import measured_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_goodput.throughput import Floats

G = np.full(4000, 0.2)
SIGMA = 3.0
PHI = SIGMA**2 / 0.2**2
"""tr(Sigma) / |G|^2 of gradients G + SIGMA * normal."""


def gradient(generator: np.random.Generator, size: int) -> Floats:
    """The mean of ``size`` samples' gradients."""
    return np.asarray(G + SIGMA / math.sqrt(size) * generator.standard_normal(len(G)))


def replicas(generator: np.random.Generator, sizes: Sequence[int]) -> StepTable:
    """The table of ranks with these samples."""
    batch = sum(sizes)
    own = [gradient(generator, size) if size else None for size in sizes]
    mean = sum(g * size / batch for g, size in zip(own, sizes, strict=True) if g is not None)
    return StepTable.of(
        *(
            StepRow(
                share=size,
                size=size,
                loss_sum=2.0 * size,
                small_square=0.0 if g is None else float(g @ g),
                small_size=size,
                big_square=float(np.dot(mean, mean)),
                big_size=batch,
            )
            for g, size in zip(own, sizes, strict=True)
        )
    )


@pytest.mark.parametrize("sizes", [[64, 64, 64, 64], [16, 112, 0, 128], [200, 56]])
def test_replicas_with_any_shares_give_the_noise_scale(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    scale = NoiseScale(64, decay=0.999)
    for _ in range(200):
        assert scale.update(replicas(generator, sizes))
    assert scale.noise_scale == pytest.approx(PHI, rel=0.25)
    noise = scale.noise
    assert noise is not None
    assert noise.noise_scale(64) == pytest.approx(scale.noise_scale, rel=1e-9)
    expected = (noise.var + noise.sqr) / (noise.var / 4 + noise.sqr)
    assert scale.gain_at(256) == pytest.approx(expected)
    assert 200 < scale.tau < 4 * 200


def test_one_replica_gives_it_by_its_first_pass(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scale = NoiseScale(64, decay=0.999)
    for _ in range(200):
        passes = [gradient(generator, 64) for _ in range(4)]
        mean = np.mean(passes, axis=0)
        row = StepRow(share=256, small_square=float(passes[0] @ passes[0]), small_size=64)
        row.big_square, row.big_size = float(mean @ mean), 256
        scale.update(StepTable.of(row))
    assert scale.noise_scale == pytest.approx(PHI, rel=0.25)


def test_a_step_that_is_not_finite_is_skipped_and_no_progress(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scale = NoiseScale(8)
    good = replicas(generator, [8, 8])
    scale.update(good)
    before = (scale.noise_scale, scale.tau)
    bad = StepTable(good.rows.copy())
    bad.rows[1, list(_columns("finite"))] = 0.0
    assert not scale.update(bad)
    nan = StepTable(good.rows.copy())
    nan.rows[0, list(_columns("small_square"))] = math.nan
    assert not scale.update(nan)
    assert scale.noise_scale == before[0]
    assert scale.skipped == 2


def _columns(name: str) -> list[int]:
    from stoker_train.elastic.optimization import STEP_FIELDS

    return [STEP_FIELDS.index(name)]


def test_steps_without_a_measurement_move_tau_alone() -> None:
    scale = NoiseScale(8)
    row = StepRow(share=16)
    assert not scale.update(StepTable.of(row))
    assert measured_pair(StepTable.of(row)) is None
    assert (scale.tau, scale.gain_at(16), scale.noise, scale.measured) == (1.0, 1.0, None, False)


def test_it_goes_on_from_its_state(seed: int) -> None:
    generator = np.random.default_rng(seed)
    one, other = NoiseScale(8), NoiseScale(8)
    for _ in range(5):
        one.update(replicas(generator, [8, 8]))
    other.load_state_dict(one.state_dict())
    table = replicas(generator, [4, 12])
    assert one.update(table)
    assert other.update(table)
    assert (one.noise_scale, one.tau) == (other.noise_scale, other.tau)


def test_it_smooths_as_the_kernels_do(seed: int) -> None:
    """Batches that change, and steps that are not measured, against the tensors of stoker_kernels."""
    import torch

    from stoker_kernels.statistics import AdaScale, GradientNoiseScale

    generator = np.random.default_rng(seed)
    scale = NoiseScale(64)
    kernel = GradientNoiseScale(decay=0.999, base_batch=64)
    ada, unmeasured = AdaScale(kernel, 64), 0.0
    for number in range(60):
        sizes = generator.integers(1, 200, size=3).tolist()
        table = replicas(generator, sizes)
        if generator.random() < 0.5 and number:
            table.rows[:, _columns("big_size")] = 0.0
            unmeasured += sum(sizes) / 64
        else:
            small, big, small_size, big_size = measured_pair(table) or (0.0, 0.0, 0.0, 0.0)
            kernel.decay = 0.999 ** (1.0 + 64 * unmeasured / sum(sizes))
            kernel.update(small, big, small_batch=small_size, big_batch=big_size)
            unmeasured = 0.0
        ada.tau += ada.gain_at(sum(sizes))
        scale.update(table)
    assert scale.noise_scale == pytest.approx(float(kernel.noise_scale), rel=1e-9)
    assert scale.tau == pytest.approx(float(ada.tau), rel=1e-9)
    old = {"tau": ada.tau, "gain": torch.ones(()), "noise": kernel.state_dict()}
    other = NoiseScale(64)
    other.load_state_dict(old)  # of a checkpoint that an older version wrote
    assert other.noise_scale == pytest.approx(float(kernel.noise_scale), rel=1e-12)
    assert other.tau == float(ada.tau)
    assert other.gain_at(300) == pytest.approx(float(ada.gain_at(300)), rel=1e-12)


def test_a_run_at_another_batch_ends_at_the_same_loss_for_the_same_tau(seed: int) -> None:
    """AdaScale: SGD on a noisy quadratic, at S = 1 and S = 8, stopped at one tau."""
    losses = []
    for batch in (64, 512):
        generator = np.random.default_rng(seed + batch)
        ends = []
        for _ in range(2):
            scale, x = NoiseScale(64), np.full(200, 3.0)
            sizes = [batch // 2] * 2
            while scale.tau < 150:
                own = [
                    x + 40.0 / math.sqrt(size) * generator.standard_normal(200) for size in sizes
                ]
                mean = (own[0] + own[1]) / 2
                rows = [
                    StepRow(
                        share=size,
                        small_square=float(g @ g),
                        small_size=size,
                        big_square=float(mean @ mean),
                        big_size=batch,
                    )
                    for g, size in zip(own, sizes, strict=True)
                ]
                x = x - 0.01 * scale.gain_at(batch) * mean
                scale.update(StepTable.of(*rows))
            ends.append(float(x @ x))
        losses.append(np.mean(ends))
    assert losses[1] == pytest.approx(losses[0], rel=0.25)
