"""Adasum: every backend against the formula in fp64."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from stoker_kernels.ops.adasum import adasum
from tests.kernels._numerics import assert_close, poison_empty
from tests.kernels.ops._far_apart import sparse, start_at_program

if TYPE_CHECKING:
    from pathlib import Path


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


def test_tiles_past_2_to_the_31_values(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of the last tile alone, on gradients of 2^31 values and some."""
    kernels = import_module("stoker_kernels.ops.adasum.triton")
    tile, rest = 2048, 1500
    n, program = 2**31 + rest, 2**31 // tile
    a, b, out = (sparse(tmp_path, n) for _ in range(3))
    near = torch.randn(2, rest)
    a[-rest:], b[-rest:] = near
    dots = sparse(tmp_path, 3 * program + 3)
    start_at_program(monkeypatch, program)
    kernels.launch(kernels.adasum_dots_kernel, (1,), a, b, dots, n, TILE=tile, on=a)
    expected = torch.stack([near[0] @ near[1], near[0] @ near[0], near[1] @ near[1]])
    torch.testing.assert_close(dots[-3:], expected)
    scale = torch.tensor([0.75, -2.0])
    kernels.launch(kernels.adasum_combine_kernel, (1,), a, b, scale, out, n, TILE=tile, on=a)
    torch.testing.assert_close(out[-rest:], 0.75 * near[0] - 2.0 * near[1])
