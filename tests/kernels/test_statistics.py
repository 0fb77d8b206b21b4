"""Gradient statistics: estimators recover a known noise, and a bad step leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch

from stoker_kernels.optim import AdamW
from stoker_kernels.statistics import (
    AdaScale,
    GradientNoiseScale,
    adam_denominators,
    estimate,
    optimizer_square_sums,
    square_sums,
    statistical_efficiency,
)

DIM, BATCH, REPLICAS = 50, 4, 8
SIGMA = torch.linspace(0.5, 3.0, DIM, dtype=torch.float64)  # standard deviation of each coordinate
MEAN = torch.linspace(-1.0, 1.0, DIM, dtype=torch.float64)
TRACE, SQUARE = float(SIGMA.square().sum()), float(MEAN.square().sum())


def replica_gradients(steps: int) -> torch.Tensor:
    """(steps, REPLICAS, DIM): means over BATCH examples whose gradients are N(MEAN, SIGMA^2)."""
    noise = torch.randn(steps, REPLICAS, DIM, dtype=torch.float64)
    return MEAN + noise * SIGMA / math.sqrt(BATCH)


def square(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.square().sum(-1)


def assert_unbiased(samples: torch.Tensor, truth: float) -> None:
    """The mean lies within 4 standard errors of the truth, and 4 standard errors are small."""
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - truth) < 4 * error
    assert 4 * error < 0.03 * abs(truth), "the test would not see a wrong factor"


def test_two_batches_recover_the_truth() -> None:
    gradients = replica_gradients(20_000)
    # Independent batches of BATCH and 3 * BATCH examples.
    small, big = square(gradients[:, 0]), square(gradients[:, 1:4].mean(1))
    signal, noise = estimate(small, big, BATCH, 3 * BATCH)
    assert_unbiased(signal, SQUARE)
    assert_unbiased(noise, TRACE)


def test_replicas_recover_the_truth() -> None:
    gradients = replica_gradients(5_000)
    mean_square, of_mean = square(gradients).mean(1), square(gradients.mean(1))
    signal, noise = estimate(mean_square, of_mean, BATCH, REPLICAS * BATCH)
    assert_unbiased(signal, SQUARE)
    assert_unbiased(noise, TRACE)
    n = REPLICAS  # the multi-replica formula as it is written elsewhere
    torch.testing.assert_close(signal, (n * of_mean - mean_square) / (n - 1))
    torch.testing.assert_close(noise, (mean_square - of_mean) * n * BATCH / (n - 1))


def test_the_smoothed_scale_recovers_the_truth_with_changing_batches() -> None:
    scale = GradientNoiseScale(decay=0.999)
    for step, gradients in enumerate(replica_gradients(8_000)):
        n = 2 + step % (REPLICAS - 1)
        scale.update_from_replicas(
            square(gradients[:n]), square(gradients[:n].mean(0)), batch=BATCH
        )
    # An average over about 2 / (1 - decay) = 2000 steps: a few per cent.
    assert float(scale.signal) == pytest.approx(SQUARE, rel=0.04)
    assert float(scale.noise) == pytest.approx(TRACE, rel=0.04)
    assert float(scale.noise_scale) == pytest.approx(TRACE / SQUARE, rel=0.06)
    assert int(scale.updates) == 8_000


def test_the_bias_of_the_start_is_corrected() -> None:
    scale = GradientNoiseScale(decay=0.99)
    assert scale.signal.isnan()
    assert scale.noise_scale.isnan()
    for _ in range(3):  # constant input: the average is that constant from the first step on
        scale.update(3.0, 2.0, small_batch=1, big_batch=2)
        torch.testing.assert_close(
            torch.stack([scale.signal, scale.noise]), torch.tensor([1.0, 2.0]).double()
        )


def test_invariances() -> None:
    gradients = replica_gradients(50)

    def run(factor: float = 1.0, examples: float = 1.0, **options: float) -> GradientNoiseScale:
        scale = GradientNoiseScale(**options)  # type: ignore[arg-type]
        for g in gradients * factor:
            scale.update_from_replicas(square(g), square(g.mean(0)), batch=BATCH * examples)
        return scale

    plain = run()
    # A larger loss changes both parts alike.
    torch.testing.assert_close(run(factor=7.0).noise_scale, plain.noise_scale)
    torch.testing.assert_close(run(factor=7.0).signal, plain.signal * 49)
    # Counting in tokens instead of sequences scales the result by tokens per sequence.
    torch.testing.assert_close(run(examples=16.0).noise_scale, plain.noise_scale * 16)
    # A step of k base batches decays as k steps do.
    weighted = run(decay=0.99, base_batch=BATCH * REPLICAS / 3)
    torch.testing.assert_close(weighted.noise_scale, run(decay=0.99**3).noise_scale)


def test_groups_are_apart_and_add_up() -> None:
    gradients = replica_gradients(200)
    both, single = GradientNoiseScale(2), GradientNoiseScale()
    for g in gradients:
        halves = torch.stack([square(g[:, :20]), square(g[:, 20:])], 1)  # (REPLICAS, 2)
        mean = g.mean(0)
        sums = torch.stack([square(mean[:20]), square(mean[20:])])
        both.update_from_replicas(halves, sums, batch=BATCH)
        single.update_from_replicas(square(g), square(mean), batch=BATCH)
    torch.testing.assert_close(both.noise, single.noise)
    torch.testing.assert_close(both.noise_scale, single.noise_scale)
    assert both.noise_scale_by_group.shape == (2,)
    torch.testing.assert_close(both.signal_by_group.sum(), single.signal)
    assert both.noise_by_group[1] > both.noise_by_group[0]  # SIGMA grows


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["small", "big"])
def test_a_step_that_is_not_finite_changes_nothing(bad: float, where: str) -> None:
    ada = AdaScale(GradientNoiseScale(2), base_batch=4)
    good = {"small": torch.tensor([3.0, 5.0]), "big": torch.tensor([2.0, 4.0])}
    ada.update(**good, small_batch=4, big_batch=8)
    before = ada.state_dict()
    broken = {**good, where: torch.tensor([1.0, bad])}
    assert not ada.update(**broken, small_batch=4, big_batch=8)
    after = ada.state_dict()
    assert torch.equal(before["noise"]["sums"], after["noise"]["sums"])
    assert torch.equal(before["gain"], after["gain"])
    assert torch.equal(before["tau"], after["tau"])
    assert int(ada.noise.skipped) == 1
    assert int(ada.noise.updates) == 1
    assert ada.update(**good, small_batch=4, big_batch=8)
    assert int(ada.noise.updates) == 2


def test_noise_that_hides_the_gradient() -> None:
    scale = GradientNoiseScale()
    scale.update(5.0, 1.0, small_batch=1, big_batch=2)  # |G|^2 = -3
    assert scale.noise_scale == math.inf
    scale = GradientNoiseScale()
    scale.update(1.0, 2.0, small_batch=1, big_batch=2)  # tr(Sigma) = -2
    assert scale.noise_scale == 0.0


def test_state_goes_on_where_it_was() -> None:
    gradients = replica_gradients(20)

    def feed(ada: AdaScale, part: torch.Tensor) -> AdaScale:
        for g in part:
            small = square(g).mean()
            ada.update(small, square(g.mean(0)), small_batch=BATCH, big_batch=32)
        return ada

    def new() -> AdaScale:
        return AdaScale(GradientNoiseScale(decay=0.9), base_batch=BATCH)

    whole = feed(new(), gradients)
    saved = feed(new(), gradients[:9]).state_dict()
    resumed = new()
    resumed.load_state_dict(saved)
    feed(resumed, gradients[9:])
    assert torch.equal(whole.gain, resumed.gain)
    assert torch.equal(whole.tau, resumed.tau)
    assert torch.equal(whole.noise.noise_scale, resumed.noise.noise_scale)
    with pytest.raises(ValueError, match="of 1 groups, not 3"):
        GradientNoiseScale(3).load_state_dict(saved["noise"])


def test_gain_lies_between_one_and_s() -> None:
    batch = BATCH * REPLICAS
    noise = GradientNoiseScale(decay=0.999)
    ada = AdaScale(noise, base_batch=BATCH)
    assert float(ada.gain) == 1.0
    assert float(ada.gain_at(batch)) == 1.0  # nothing measured yet
    for g in replica_gradients(4_000):
        ada.update(square(g).mean(), square(g.mean(0)), small_batch=BATCH, big_batch=batch)
    variance = TRACE / BATCH
    expected = (variance + SQUARE) / (variance / REPLICAS + SQUARE)
    assert float(ada.gain) == pytest.approx(expected, rel=0.02)
    assert 1.0 < float(ada.gain) < REPLICAS
    # tau counts base iterations: about gain * steps, and lr follows the base schedule there.
    assert float(ada.tau) == pytest.approx(4_000 * expected, rel=0.02)
    assert ada.lr(lambda step: 2.0 if step == int(ada.tau) else 0.0) == 2.0 * float(ada.gain)
    assert float(ada.gain_at(BATCH)) == 1.0
    assert BATCH / 8 / BATCH <= float(ada.gain_at(BATCH / 8)) <= 1.0
    # Gain per replica is Pollux's efficiency.
    torch.testing.assert_close(
        ada.gain_at(batch) / REPLICAS, statistical_efficiency(noise.noise_scale, BATCH, batch)
    )


@pytest.mark.parametrize(("small", "big", "gain"), [(2.0, 2.0, 1.0), (8.0, 1.0, 8.0)])
def test_extremes_of_the_gain(small: float, big: float, gain: float) -> None:
    """Without noise a large batch is worth one step; pure noise makes it worth S."""
    ada = AdaScale(GradientNoiseScale(), base_batch=1)
    ada.update(small, big, small_batch=1, big_batch=8)
    assert float(ada.gain) == pytest.approx(gain)


def test_efficiency() -> None:
    assert statistical_efficiency(100.0, 32, 32) == 1.0
    assert statistical_efficiency(0.0, 32, 64) == 0.5
    assert statistical_efficiency(math.inf, 32, 64) == 1.0
    torch.testing.assert_close(
        statistical_efficiency(torch.tensor([100.0, 0.0]), 50, 100),
        torch.tensor([0.75, 0.5]).double(),
    )


def parameters() -> list[torch.nn.Parameter]:
    shapes = ((3, 5), (7,), (2, 2))
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    found = [
        torch.nn.Parameter(torch.randn(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)
    ]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


def test_square_sums_of_mixed_dtypes_and_missing_gradients() -> None:
    a, b, c = parameters()
    missing = torch.nn.Parameter(torch.ones(3))
    sums = square_sums([[a, b, missing], [c], [missing], []])
    expected = [a.grad.double().square().sum() + b.grad.double().square().sum()]
    expected += [c.grad.square().sum(), torch.zeros(()), torch.zeros(())]
    torch.testing.assert_close(sums, torch.stack([e.double() for e in expected]))
    assert sums.dtype == torch.float64
    a.grad.fill_(1e-25)  # its square has no float32
    assert square_sums([[a]])[0] == pytest.approx(15e-50, rel=1e-4)
    with pytest.raises(ValueError, match="no parameter"):
        square_sums([[]])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_preconditioned_squares_are_those_of_adams_step(kind: type, amsgrad: bool) -> None:
    """Without momentum Adam moves by lr * g / denominator: the square of the step says the same."""
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(40, dtype=torch.float64))
    optimizer = kind([p], lr=0.1, betas=(0.0, 0.9), weight_decay=0.0, amsgrad=amsgrad)
    assert torch.equal(adam_denominators(optimizer)[p], torch.ones_like(p))
    for scale in (1.0, 5.0, 0.1, 0.1):
        p.grad = scale * torch.randn_like(p)
        before = p.detach().clone()
        optimizer.step()
        sums = square_sums([[p]], adam_denominators(optimizer))
        torch.testing.assert_close(sums[0], ((p.detach() - before) / 0.1).square().sum())


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_our_optimizers_have_measured_already(max_grad_norm: float | None) -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(5)) for _ in range(count)]}
        for count in (3, 1, 2)
    ]
    optimizer = AdamW(groups, max_grad_norm=max_grad_norm)
    with pytest.raises(ValueError, match="no step yet"):
        optimizer_square_sums(optimizer)
    for group in groups:
        for p in group["params"][1:] or group["params"]:  # the first of some has no gradient
            p.grad = torch.randn_like(p)
    expected = square_sums(group["params"] for group in groups)
    optimizer.step()
    torch.testing.assert_close(optimizer_square_sums(optimizer), expected)


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no value to read: whatever needs one raises."""
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], capturable=False)
    optimizer.state[p] = {"step": torch.ones((), device="meta"), "exp_avg_sq": torch.ones_like(p)}
    sums = square_sums([[p]], adam_denominators(optimizer))
    ada = AdaScale(GradientNoiseScale(device="meta"), base_batch=1)
    ada.update(sums, sums, small_batch=1, big_batch=2)
    assert ada.gain.is_meta
    assert ada.noise.noise_scale.is_meta


def test_errors() -> None:
    with pytest.raises(ValueError, match="needs 0 < small_batch < big_batch"):
        GradientNoiseScale().update(1.0, 1.0, small_batch=8, big_batch=8)
    with pytest.raises(ValueError, match=r"small must have shape \(2,\)"):
        GradientNoiseScale(2).update(torch.ones(3), torch.ones(2), small_batch=1, big_batch=2)
    for options, match in (
        ({"groups": 0}, "groups"),
        ({"decay": 1.0}, "decay"),
        ({"base_batch": 0}, "base_batch"),
    ):
        with pytest.raises(ValueError, match=match):
            GradientNoiseScale(**options)
    with pytest.raises(ValueError, match="base_batch"):
        AdaScale(GradientNoiseScale(), base_batch=0)
