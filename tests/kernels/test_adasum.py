"""Adasum: every backend against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.ops.adasum import adasum
from tests.kernels._numerics import assert_close, poison_empty


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula, as it is written."""
    dot = (a * b).sum()
    scale_a = 1 - dot / (2 * (a * a).sum()) if a.any() else 1.0
    scale_b = 1 - dot / (2 * (b * b).sum()) if b.any() else 1.0
    return scale_a * a + scale_b * b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 65), (3, 5, 401)])
def test_matches_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    common = torch.randn(shape)
    a, b = ((common + torch.randn(shape)).to(dtype) for _ in range(2))
    before = a.clone(), b.clone()
    out = adasum([a, b])
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    oracle = pair(a.double(), b.double())
    assert_close(out, pair(a.float(), b.float()).to(dtype), oracle, terms=a.abs().max().item())


def test_sum_when_orthogonal_mean_when_equal_zero_when_opposed(backend: str) -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert adasum([x, y]).tolist() == [1.0, 1.0]
    assert adasum([x, x]).tolist() == [1.0, 0.0]
    assert adasum([x, -x]).tolist() == [0.0, 0.0]
    a = torch.randn(100)
    torch.testing.assert_close(adasum([a, 3 * a]), 2 * a)


def test_zero_norms(backend: str) -> None:
    a, zero = torch.randn(50), torch.zeros(50)
    assert torch.equal(adasum([a, zero]), a)
    assert torch.equal(adasum([zero, a]), a)
    assert torch.equal(adasum([zero, zero]), zero)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_a_tree_over_any_number_of_workers(backend: str, workers: int) -> None:
    gradients = [torch.randn(40) for _ in range(workers)]
    level = [g.double() for g in gradients]
    while len(level) > 1:
        pairs = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    out = adasum(gradients)
    torch.testing.assert_close(out.double(), level[0], rtol=1e-5, atol=1e-5)
    assert out.data_ptr() not in {g.data_ptr() for g in gradients}
    same = adasum([gradients[0]] * workers)
    torch.testing.assert_close(same, gradients[0])


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    a, b = torch.randn(5000), torch.randn(5000)
    scaled = adasum([a * magnitude, b * magnitude]) / magnitude
    torch.testing.assert_close(scaled, adasum([a, b]))


def test_strided_empty_nan_and_repeat(backend: str) -> None:
    a, b = torch.randn(6, 5).t(), torch.randn(5, 6)
    assert torch.equal(adasum([a, b]), adasum([a.contiguous(), b]))
    assert adasum([torch.zeros(0, 3)] * 2).shape == (0, 3)
    a = torch.randn(100)
    a[3] = float("nan")
    assert not adasum([a, torch.randn(100)]).isfinite().any()
    with pytest.raises(ValueError, match="at least one tensor"):
        adasum([])
    with pytest.raises(ValueError, match="gradients must be alike"):
        adasum([a, b])
