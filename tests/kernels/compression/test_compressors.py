"""Gradient exchange: what is particular to each method. What holds for all: ``test_compression``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stoker_kernels
from stoker_kernels import compression
from stoker_kernels.compression import (
    DGC,
    Chunks,
    Compressor,
    OneBitAdam,
    PowerSGD,
    make_compressor,
    simulate,
)
from stoker_kernels.compression.powersgd import orthonormal
from stoker_kernels.compression.sidco import fit_threshold

SHAPE = (40, 50)


def test_onebit_adam_freezes_its_variance_and_trains_nearly_as_adam() -> None:
    """A small least-squares problem on 4 workers: loss within 2 % of Adam's gain; no bit of v moves."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(40, 16, generator=generator) for _ in range(4)]
    wanted = [torch.randn(40, 12, generator=generator) for _ in range(4)]

    def train(compressors: list[Compressor], adam: Callable[[Any], Any]) -> tuple[float, Any]:
        w = torch.nn.Parameter(torch.zeros(16, 12))
        optimizer = adam([w])
        frozen = None
        for step in range(300):
            gradients = [
                a.t() @ (a @ w.detach() - b) / 40 for a, b in zip(data, wanted, strict=True)
            ]
            w.grad = simulate(compressors, gradients, "w")[0]
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - step / 300)
            optimizer.step()
            if step == 49:
                frozen = optimizer.state[w]["exp_avg_sq"].clone()
        residual = sum((a @ w - b).square().sum().item() for a, b in zip(data, wanted, strict=True))
        return residual, (frozen, optimizer.state[w]["exp_avg_sq"])

    start = sum(b.square().sum().item() for b in wanted)
    plain, _ = train(
        [make_compressor("none") for _ in range(4)], lambda p: torch.optim.Adam(p, eps=1e-8)
    )
    ours = [make_compressor("onebit_adam", freeze=50) for _ in range(4)]
    left, (frozen, after) = train(ours, lambda p: OneBitAdam(p, freeze=50, eps=1e-8))
    assert torch.equal(frozen, after)
    assert left - plain < 0.02 * (start - plain)


def test_onebit_adam_is_adam_before_the_freeze() -> None:
    w, other = (torch.nn.Parameter(torch.ones(30)) for _ in range(2))
    optimizers = (
        OneBitAdam([w], lr=0.1, weight_decay=0.1),
        torch.optim.AdamW([other], lr=0.1, weight_decay=0.1),
    )
    for _ in range(20):
        w.grad = torch.randn(30)
        other.grad = w.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(w, other)
    with pytest.raises(ValueError, match="freeze must be at least one step"):
        OneBitAdam([w], freeze=0)


def test_dgc_without_a_rest_is_momentum_sgd() -> None:
    dgc = make_compressor("dgc", ratio=1.0, momentum=0.9, masking=False)
    velocity = torch.zeros(SHAPE)
    for _ in range(4):
        gradient = torch.randn(SHAPE)
        velocity = 0.9 * velocity + gradient
        torch.testing.assert_close(simulate([dgc], [gradient], "w")[0], velocity)


def test_dgc_warms_up_clips_and_masks() -> None:
    dgc = DGC(ratio=0.001, warmup_steps=10, clip=1.0, workers=4)
    assert [round(dgc.ratio_at(step), 4) for step in (0, 2, 4, 6, 8, 10)] == [
        0.25, 0.0829, 0.0275, 0.0091, 0.003, 0.001,
    ]  # fmt: skip
    dgc = DGC(ratio=0.5, clip=1.0, workers=4)
    message = dgc.compress(torch.full((4,), 10.0), "w")
    torch.testing.assert_close(message.tensors[0], torch.full((2,), 0.25))  # norm 20 -> 1 / sqrt(4)
    assert dgc.memory("w")["velocity"].tolist() == [0.0, 0.0, 0.25, 0.25]
    with pytest.raises(ValueError, match="momentum must be in"):
        DGC(momentum=1.0)
    with pytest.raises(ValueError, match="clip must be a positive norm"):
        DGC(clip=0.0)


@pytest.mark.parametrize("fit", ["exponential", "gamma", "pareto"])
def test_sidco_meets_its_target_where_the_distribution_fits(fit: str) -> None:
    """A Laplace gradient's magnitudes are exponential, which all three contain."""
    uniform = torch.rand(200_000, dtype=torch.float64)
    magnitudes = -uniform.log()
    for stages in (1, 2, 3):
        threshold = fit_threshold(magnitudes, 2000.0, fit, stages)
        assert 1800 <= (magnitudes >= threshold).sum() <= 2200


def test_sidco_adds_stages_where_it_does_not() -> None:
    """Heavy tails: one exponential is off by more than its tolerance, several are not."""
    sidco = make_compressor("sidco", ratio=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(11):
        sidco.memory("w").pop("memory", None)
        sidco.compress(torch.randn(50_000, generator=generator) ** 3, "w")
    assert int(sidco.memory("w")["stages"]) >= 2
    magnitudes = (torch.randn(50_000, generator=generator) ** 3).abs()
    errors = [
        abs(
            int((magnitudes >= fit_threshold(magnitudes, 500.0, "exponential", stages)).sum()) - 500
        )
        for stages in (1, 4)
    ]
    assert errors[0] > 100 > errors[1]


def test_sidco_sends_equal_magnitudes_too() -> None:
    result = simulate([make_compressor("sidco", ratio=0.1)], [torch.full((40,), 2.0)], "w")[0]
    assert int((result == 2.0).sum()) == 5  # every place of the message
    with pytest.raises(ValueError, match="fit must be one of exponential, gamma, pareto"):
        make_compressor("sidco", fit="normal")


def test_powersgd_is_exact_for_its_rank_and_leaves_small_ones_alone() -> None:
    low = torch.randn(60, 2, dtype=torch.float64) @ torch.randn(2, 50, dtype=torch.float64)
    torch.testing.assert_close(simulate([PowerSGD(rank=2)], [low], "w")[0], low)
    torch.testing.assert_close(simulate([PowerSGD(rank=4)], [low], "w")[0], low)
    power = PowerSGD(rank=4, min_rate=2.0, start=1)
    assert [power.compresses(torch.Size(s)) for s in ((1000,), (8, 8), (100, 10, 10))] == [
        False, False, True,
    ]  # fmt: skip
    gradient = torch.randn(100, 100)
    assert torch.equal(simulate([power], [gradient], "w")[0], gradient)
    assert not torch.equal(simulate([power], [gradient], "w")[0], gradient)


def test_powersgd_workers_errors_add_up_to_what_the_mean_lacks() -> None:
    powers = [PowerSGD(rank=2) for _ in range(3)]
    gradients = [torch.randn(SHAPE, dtype=torch.float64) for _ in powers]
    result = simulate(powers, gradients, "w")[0]
    errors = torch.stack([power.memory("w")["error"].view(SHAPE) for power in powers])
    torch.testing.assert_close(result + errors.mean(0), torch.stack(gradients).mean(0))


def test_powersgd_recovers_lost_directions() -> None:
    """After a gradient of rank 1, whose other columns of Q vanish, rank 2 is exact again."""
    power = PowerSGD(rank=2)
    one = torch.randn(60, 1, dtype=torch.float64) @ torch.randn(1, 50, dtype=torch.float64)
    two = torch.randn(60, 2, dtype=torch.float64) @ torch.randn(2, 50, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(simulate([power], [one], "w")[0], one)
    torch.testing.assert_close(simulate([power], [two], "w")[0], two)


def test_orthonormal_columns_or_zeros() -> None:
    basis = orthonormal(torch.randn(30, 5))
    torch.testing.assert_close(basis.t() @ basis, torch.eye(5))
    dependent = torch.randn(30, 1).expand(30, 3) * torch.tensor([1.0, 2.0, 0.0])
    basis = orthonormal(dependent)
    torch.testing.assert_close(basis[:, 0].norm(), torch.tensor(1.0))
    assert not basis[:, 1:].any()


def test_chunks_are_chosen_together_and_bytes_do_not_grow_with_workers() -> None:
    """The chunk that is largest on average wins, though no worker's own largest it is."""
    workers = [Chunks(ratio=0.25, chunk=4) for _ in range(2)]
    gradients = [torch.zeros(16), torch.zeros(16)]
    gradients[0][:4], gradients[1][4:8] = 5.0, 5.0
    gradients[0][8:12] = gradients[1][8:12] = 4.0
    result = simulate(workers, gradients, "w")[0]
    assert result.nonzero().view(-1).tolist() == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="choose their chunks together"):
        workers[0].decompress([workers[0].compress(gradients[0], "w")] * 2)
    dense = [Chunks(ratio=1.0, chunk=7) for _ in range(3)]
    gradients = [torch.randn(SHAPE) for _ in dense]
    torch.testing.assert_close(simulate(dense, gradients, "w")[0], torch.stack(gradients).mean(0))


def test_the_package_has_the_names_for_users() -> None:
    for name in (
        "Compressor", "GradientExchange", "HookState", "OneBitAdam", "compression_hook",
        "make_compressor",
    ):  # fmt: skip
        assert name in stoker_kernels.__all__
        assert getattr(stoker_kernels, name) is getattr(compression, name)


def test_unknown_names_and_options() -> None:
    with pytest.raises(ValueError, match="no compressor 'zip': there are none, fp16"):
        make_compressor("zip")
    for name in ("topk", "dgc", "sidco", "csc"):
        with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\], got 0"):
            make_compressor(name, ratio=0.0)
    with pytest.raises(ValueError, match="rank must be >= 1"):
        make_compressor("powersgd", rank=0)
