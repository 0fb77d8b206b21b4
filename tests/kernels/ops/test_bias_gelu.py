"""Bias + GELU: every backend against fp64 torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import BiasGELU, bias_gelu
from tests.kernels._numerics import assert_close, leaves, poison_empty
from tests.kernels.ops._far_apart import far_apart

if TYPE_CHECKING:
    from pathlib import Path


# The interpreter computes in NumPy, which warns of what the kernels allow for.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)


@pytest.fixture(params=["tanh", "none"])
def approximate(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def check(x: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, approximate: str) -> None:
    """Forward and backward against fp64, with torch in x's dtype as witness."""
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        if ours:
            xs, bs = x.detach().requires_grad_(), bias.detach().requires_grad_()
            y = bias_gelu(xs, bs, approximate=approximate)
            y.backward(dy)
        else:
            xs, bs = leaves(x, bias, dtype=dtype)
            y = F.gelu(xs + bs, approximate=approximate)
            y.backward(dy.to(dtype))
        results.append((y, xs.grad, bs.grad))
    for name, kernel, witness, oracle in zip(("y", "dx", "dbias"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (37, 48), (3, 5, 129), (9, 2200)])
def test_matches_fp64(
    backend: str,
    approximate: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    x, bias, dy = (torch.randn(s).to(dtype) for s in (shape, shape[-1:], shape))
    check(x, bias, dy, approximate)


def test_many_rows_add_up_to_dbias(interpreter: None, approximate: str) -> None:
    """More row blocks than programs: each program's loop goes round, the last time half masked."""
    check(torch.randn(107, 300), torch.randn(300), torch.randn(107, 300), approximate)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, approximate: str, magnitude: float) -> None:
    x, bias = torch.randn(9, 33) * magnitude, torch.randn(33) * magnitude
    check(x, bias, torch.randn(9, 33), approximate)


def test_the_sum_is_not_rounded_to_the_storage_dtype(backend: str) -> None:
    x, bias = torch.full((1, 8), 256.0).bfloat16(), torch.full((8,), -255.5)
    y = bias_gelu(x, bias)
    torch.testing.assert_close(y, F.gelu(torch.full((1, 8), 0.5), approximate="tanh").bfloat16())


def test_mixed_dtypes_keep_each_tensor_s_dtype(backend: str) -> None:
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    bias = torch.randn(16, requires_grad=True)
    y = bias_gelu(x, bias)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert bias.grad.dtype == torch.float32


def test_strided_input_and_stride_0_gradient(backend: str, approximate: str) -> None:
    bias = torch.randn(16)
    check(torch.randn(16, 6).t(), bias, torch.ones(()).expand(6, 16), approximate)
    check(torch.randn(6, 32)[:, :16], bias, torch.randn(16, 6).t(), approximate)
    check(torch.randn(6, 16), torch.randn(32)[::2], torch.randn(6, 16), approximate)
    check(
        torch.randn(16).expand(6, 16), torch.randn(()).expand(16), torch.randn(6, 16), approximate
    )


def test_offsets_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    x, dy, bias = torch.randn(3, 8).half(), torch.randn(3, 8).half(), torch.randn(8).half()
    (tmp_path / "x").mkdir()
    results = []
    for values, upstream in (
        (far_apart(x, 0, tmp_path / "x"), far_apart(dy, 0, tmp_path)),
        (x.clone(), dy),
    ):
        (bs,) = leaves(bias)
        y = bias_gelu(values.requires_grad_(), bs)
        y.backward(upstream)
        results.append((y, values.grad, bs.grad))
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty(backend: str, shape: tuple[int, int]) -> None:
    x, bias = leaves(torch.zeros(shape), torch.ones(shape[1]))
    bias_gelu(x, bias).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(bias.grad, torch.zeros(shape[1]))


def test_backward_leaves_the_upstream_gradient_alone(backend: str) -> None:
    x, bias = leaves(torch.randn(4, 8), torch.randn(8))
    dy = torch.randn(4, 8)
    before = dy.clone()
    bias_gelu(x, bias).backward(dy)
    assert torch.equal(dy, before)


def test_repeats_bit_for_bit(backend: str, approximate: str) -> None:
    x, bias, dy = torch.randn(70, 200), torch.randn(200), torch.randn(70, 200)
    grads = []
    for _ in range(2):
        xs, bs = leaves(x, bias)
        bias_gelu(xs, bs, approximate=approximate).backward(dy)
        grads.append((xs.grad, bs.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_infinities_and_nan_stay_in_their_place(backend: str, approximate: str) -> None:
    x, bias = torch.randn(4, 8), torch.randn(8)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    x, bias = leaves(x, bias)
    y = bias_gelu(x, bias, approximate=approximate)
    y.sum().backward()
    assert not y[1, 2].isfinite()
    assert y[2, 3].isnan()
    assert y.isfinite().sum() == 30
    assert x.grad[2, 3].isnan()
    assert bias.grad[3].isnan()
    assert bias.grad[[0, 1, 4, 5, 6, 7]].isfinite().all()


def test_one_tensor_as_input_and_bias(backend: str) -> None:
    (x,) = leaves(torch.randn(8))
    (twice,) = leaves(x)
    bias_gelu(x, x).sum().backward()
    F.gelu(twice + twice, approximate="tanh").sum().backward()
    torch.testing.assert_close(x.grad, twice.grad)


def test_gradcheck(approximate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    x, bias = leaves(torch.randn(3, 5), torch.randn(5), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: bias_gelu(a, b, approximate=approximate), (x, bias)
    )
    oracle = F.gelu(x + bias, approximate=approximate)
    assert_close(bias_gelu(x, bias, approximate=approximate), oracle, oracle)


def test_module_and_errors() -> None:
    module = BiasGELU(8, "none")
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), F.gelu(x))
    assert repr(module) == "BiasGELU(8, approximate='none')"
    with pytest.raises(ValueError, match="BiasGELU: approximate"):
        BiasGELU(8, "erf")
    with pytest.raises(ValueError, match="approximate must be 'tanh' or 'none', got 'erf'"):
        bias_gelu(x, module.bias, approximate="erf")
    with pytest.raises(ValueError, match=r"bias must have shape \(N,\)"):
        bias_gelu(x, torch.ones(7))
    with pytest.raises(TypeError, match="floating point"):
        bias_gelu(torch.ones(2, 8, dtype=torch.int32), torch.ones(8))


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        bias_gelu(torch.randn(2, 8).double(), torch.ones(8).double())
