"""RMSNorm: every backend against fp64 torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import rms_norm
from stoker_kernels.ops.rms_norm import RMSNorm, reference
from tests.kernels._numerics import assert_close, leaves, poison_empty

EPS = 1e-6


def check(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward of rms_norm against fp64, with torch in x's dtype as witness."""
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        xs, ws = leaves(x, weight, dtype=dtype)
        y = rms_norm(xs, ws, eps=EPS) if ours else F.rms_norm(xs, ws.shape, ws, EPS)
        y.backward(dy.to(dtype))
        results.append((y, xs.grad, ws.grad))
    for name, kernel, witness, oracle in zip(("y", "dx", "dw"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (131, 48), (3, 5, 129), (2, 4097)])
def test_matches_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    check(
        torch.randn(shape).to(dtype),
        (1 + 0.1 * torch.randn(shape[-1])).to(dtype),
        torch.randn(shape).to(dtype),
    )


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    check(torch.randn(9, 33) * magnitude, torch.randn(33), torch.randn(9, 33))


def test_zero_rows_stay_finite(backend: str) -> None:
    x, w = leaves(torch.zeros(3, 8), torch.ones(8))
    rms_norm(x, w, eps=EPS).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_strided_input_and_stride_0_gradient(backend: str) -> None:
    x = torch.randn(16, 6).t()  # last dimension has stride 6
    weight = torch.randn(16)
    check(x, weight, torch.ones(()).expand(6, 16))
    check(torch.randn(6, 32)[:, :16], weight, torch.randn(16, 6).t())


def test_mixed_dtypes_keep_each_tensor_s_dtype(backend: str) -> None:
    x, w = torch.randn(4, 16).bfloat16().requires_grad_(), torch.ones(16, requires_grad=True)
    y = rms_norm(x, w)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_empty_batch(backend: str) -> None:
    x, w = leaves(torch.zeros(0, 8), torch.ones(8))
    rms_norm(x, w).sum().backward()
    assert torch.equal(w.grad, torch.zeros(8))


def test_backward_leaves_the_upstream_gradient_alone(backend: str) -> None:
    x, w = leaves(torch.randn(4, 8), torch.randn(8))
    dy = torch.randn(4, 8)
    before = dy.clone()
    rms_norm(x, w).backward(dy)
    assert torch.equal(dy, before)


def test_repeats_bit_for_bit(backend: str) -> None:
    x, w, dy = torch.randn(70, 200), torch.randn(200), torch.randn(70, 200)
    grads = []
    for _ in range(2):
        xs, ws = leaves(x, w)
        rms_norm(xs, ws).backward(dy)
        grads.append((xs.grad, ws.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_nan_stays_in_its_row(backend: str) -> None:
    x = torch.randn(4, 8)
    x[2, 3] = float("nan")
    y = rms_norm(x, torch.ones(8))
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    x, w = leaves(torch.randn(3, 5), torch.randn(5), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, eps=EPS), (x, w))
    y, h, rstd = reference.rms_norm_fwd(x, None, w, EPS)
    torch.testing.assert_close(y, F.rms_norm(x, (5,), w, EPS), rtol=1e-12, atol=1e-12)
    assert h.numel() == 0
    assert rstd.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 129), (131, 48)])
def test_residual_sum_and_its_gradient(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    x, residual, dy, dh = (torch.randn(shape).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1]).to(dtype)
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        xs, rs, ws = leaves(x, residual, weight, dtype=to)
        if ours:
            y, h = rms_norm(xs, ws, eps=EPS, residual=rs)
        else:
            h = xs + rs
            y = F.rms_norm(h, ws.shape, ws, EPS)
        torch.autograd.backward([y, h], [dy.to(to), dh.to(to)])
        assert torch.equal(xs.grad, rs.grad)
        results.append((y, h, xs.grad, ws.grad))
    for name, kernel, witness, oracle in zip(("y", "h", "dx", "dw"), *results, strict=True):
        # h is rounded once before it is normalised: that error is in the witness too.
        assert_close(kernel, witness, oracle, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("offset", [1.0, None])
def test_offset_and_no_weight(
    backend: str,
    offset: float | None,
    has_residual: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma's factor 1 + w with a small w, in bf16 too: the sum is fp32's. Or none at all."""
    poison_empty(monkeypatch)
    x, residual, dy = (torch.randn(3, 5, 129).to(dtype) for _ in range(3))
    weight = (0.01 * torch.randn(129)).to(dtype)
    results = []
    for to, ours in ((dtype, True), (torch.float32, False), (torch.float64, False)):
        xs, rs, ws = leaves(x, residual, weight, dtype=to)
        given = None if offset is None else ws
        if ours and has_residual:
            y, _ = rms_norm(xs, given, eps=EPS, residual=rs, offset=offset or 0.0)
        elif ours:
            y = rms_norm(xs, given, eps=EPS, offset=offset or 0.0)
        else:
            h = xs + rs if has_residual else xs
            h = h + (h.detach().to(dtype).to(to) - h.detach())  # rounded once
            y = F.rms_norm(h, ws.shape, None if given is None else 1 + ws, EPS)
        y.backward(dy.to(to))
        results.append([y, xs.grad, *([] if offset is None else [ws.grad])])
    for name, kernel, witness, oracle in zip(
        ("y", "dx", "dw")[: len(results[0])], *results, strict=True
    ):
        assert_close(kernel, witness.to(dtype), oracle, name)


def test_one_tensor_as_input_and_residual(backend: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y, h = rms_norm(x, torch.ones(8), residual=x)
    torch.testing.assert_close(h, 2 * x)
    h.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((3, 8), 2.0))
    assert y.isfinite().all()


@pytest.mark.parametrize("unused", [0, 1])
def test_an_output_nobody_used(backend: str, unused: int) -> None:
    """Its missing gradient counts as zeros."""
    start, residual, dout = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)
    results = []
    for explicit in (False, True):
        x, r = leaves(start, residual)
        outputs = rms_norm(x, torch.ones(8), residual=r)
        gradients = [dout, torch.zeros(3, 8)] if unused else [torch.zeros(3, 8), dout]
        if explicit:
            torch.autograd.backward(outputs, gradients)
        else:
            outputs[1 - unused].backward(dout)
        results.append((x.grad, r.grad))
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


def test_module_and_errors() -> None:
    x = torch.randn(2, 8)
    plain = RMSNorm(8)(x)
    assert plain.shape == (2, 8)
    assert torch.equal(RMSNorm(8, offset=1.0)(x), plain)
    assert torch.equal(RMSNorm(8, affine=False)(x), plain)
    assert not list(RMSNorm(8, affine=False).parameters())
    with pytest.raises(ValueError, match=r"offset 1\.0 needs a weight"):
        rms_norm(x, None, offset=1.0)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(torch.randn(2, 8), torch.ones(7))
    with pytest.raises(ValueError, match="residual must match x"):
        rms_norm(torch.randn(2, 8), torch.ones(8), residual=torch.randn(3, 8))


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        rms_norm(torch.randn(2, 8).double(), torch.ones(8).double())
