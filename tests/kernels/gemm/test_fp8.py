"""fp8 linear layers: every backend within the bounds that ``fp8.reference`` states, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import fp8_linear
from stoker_kernels.ops.gemm.fp8 import autograd, reference
from stoker_kernels.runtime.device import Device
from tests.kernels._numerics import leaves, poison_empty

# The interpreter computes in NumPy, which warns of infinity times zero.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# Rounding twice to e4m3; to e5m2 and to e4m3: of the sum of the products' absolute values.
FORWARD, GRADIENT = 2**-3 + 2**-8, 2**-3 + 2**-4 + 2**-7
# Root mean square over that of a result: independent errors, uniform within half of a last place.
TYPICAL = {"y": 0.05, "dx": 0.08}


def check(
    scaling: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor
) -> None:
    """All values within the bound, and the usual error far within."""
    xs, ws, bs = leaves(x, w, b)
    y = fp8_linear(xs, ws, bs, scaling=scaling)
    y.backward(dy)
    x, w, dy = x.double(), w.double(), dy.double()
    stored = torch.finfo(y.dtype).eps
    for name, ours, exact, bound in (
        ("y", y.double() - b.double(), F.linear(x, w), FORWARD * F.linear(x.abs(), w.abs())),
        ("dx", xs.grad.double(), dy @ w, GRADIENT * (dy.abs() @ w.abs())),
    ):
        # What small values add: at most a last place of each group's largest, over the whole sum.
        small = 2.0**-10 / 448 * x.shape[-1] * (x.abs().max() * w.abs().max() + dy.abs().max())
        allowed = bound + small + 4 * stored * (exact.abs() + b.double().abs().max())
        assert ((ours - exact).abs() <= allowed).all(), name
        ratio = ((ours - exact).norm() / exact.norm()).item()
        assert ratio <= TYPICAL[name], (name, ratio)
    torch.testing.assert_close(
        ws.grad.double(), dy.t() @ x, rtol=8 * stored, atol=8 * stored * x.shape[0] ** 0.5
    )
    torch.testing.assert_close(bs.grad.double(), dy.sum(0), rtol=4 * stored, atol=8 * stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_errors_stay_within_the_bounds(
    backend: str, scaling: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    made = torch.randn(19, 150), torch.randn(141, 150) / 12, torch.randn(141), torch.randn(19, 141)
    check(scaling, *(t.to(dtype) for t in made))


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_rows_far_apart_in_size_keep_their_precision(backend: str, scaling: str) -> None:
    """A token a million times the next: scales are by row, so each keeps its digits."""
    x = torch.randn(6, 130) * torch.logspace(-3, 3, 6)[:, None]
    y = fp8_linear(x, torch.randn(40, 130), scaling=scaling)
    exact = F.linear(x, torch.ones(40, 130))
    assert y.shape == exact.shape
    w = torch.eye(40, 130)
    for ours, wanted in zip(fp8_linear(x, w, scaling=scaling), x[:, :40], strict=True):
        assert (ours - wanted).norm() <= 0.05 * wanted.norm()


def test_blocks_hold_an_outlier_where_it_is(backend: str) -> None:
    """With one scale to a row, a large value costs the small ones their digits; a block of 128 does not."""
    x = torch.full((1, 256), 1e-3)
    x[0, 0] = 1e4
    w = torch.zeros(8, 256)
    w[:, 128:] = 1.0
    by_row, by_block = (fp8_linear(x, w, scaling=scaling)[0, 0] for scaling in ("row", "block"))
    torch.testing.assert_close(by_block.item(), 0.128, rtol=0.07, atol=0)
    assert abs(by_row - 0.128) > 0.1


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_zeros_nan_and_infinity(backend: str, scaling: str) -> None:
    x, w = torch.zeros(4, 20), torch.randn(9, 20)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    x[3] = 1e-40
    y = fp8_linear(x, w, scaling=scaling)
    assert torch.equal(y[0], torch.zeros(9))
    assert not y[1].isfinite().any()
    assert not y[2].isfinite().any()
    assert y[3].abs().max() < 1e-30
    x = torch.randn(4, 40)
    x[1, 3] = float("nan")
    y, turned = fp8_linear(x, w.repeat(1, 2), scaling=scaling), fp8_linear(w.repeat(1, 2), x)
    assert (
        y.isfinite().all(1).tolist()
        == turned.isfinite().all(0).tolist()
        == [True, False, True, True]
    )


def test_the_same_weight_either_way(interpreter: None) -> None:
    """The kernels' quantised operands are the reference's, bit for bit."""
    from stoker_kernels.ops.gemm.fp8 import triton

    x = torch.randn(21, 150) * torch.logspace(-2, 2, 150)
    for given in (x, x.t()):
        q, scale = triton.quantize_rows(given, reference.FORWARD)
        wanted = reference.rounded(given, 1, given.shape[1], reference.FORWARD)
        assert torch.equal(q.float()[:, : given.shape[1]] * scale[:, None], wanted)
        assert not q.float()[:, given.shape[1] :].any()
        q, scale = triton.quantize_blocks(given, reference.FORWARD, per_row=False)
        spread = scale.repeat_interleave(128, 0)[: len(given)].repeat_interleave(128, 1)
        wanted = reference.rounded(given, 128, 128, reference.FORWARD)
        assert torch.equal((q.float() * spread)[:, : given.shape[1]], wanted)


def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_arch", lambda x: Device(80, 108).arch)
    x, w = torch.randn(3, 20), torch.randn(5, 20)
    with pytest.raises(
        RuntimeError, match=r"this GPU is sm_80, fp8 products need sm_89.*\n.*fallback"
    ):
        fp8_linear(x, w)
    assert torch.equal(fp8_linear(x, w, fallback=True), F.linear(x, w))


def test_empty_batch_and_errors(backend: str) -> None:
    x, w = leaves(torch.zeros(0, 20), torch.randn(5, 20))
    y = fp8_linear(x, w)
    y.sum().backward()
    assert y.shape == (0, 5)
    assert torch.equal(w.grad, torch.zeros(5, 20))
    (rows,) = leaves(torch.randn(3, 20))
    fp8_linear(rows, torch.zeros(0, 20)).sum().backward()
    assert torch.equal(rows.grad, torch.zeros(3, 20))
    with pytest.raises(ValueError, match="scaling must be one of row, block, got 'tensor'"):
        fp8_linear(x, w, scaling="tensor")
    with pytest.raises(ValueError, match=r"fp8_linear: weight must be \(N, K\)"):
        fp8_linear(x[:, 1:], w)
    with pytest.raises(ValueError, match=r"bias must be \(5,\) of x's dtype"):
        fp8_linear(x, w, torch.zeros(4))
    with pytest.raises(TypeError, match="floating point"):
        fp8_linear(x.long(), w.long())
