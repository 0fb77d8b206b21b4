"""Causal attention: every backend against fp64 torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import flash_attention
from stoker_kernels.ops.attention import reference
from tests.kernels._numerics import assert_close, leaves, poison_empty


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The textbook formula in the inputs' dtype: oracle in fp64, witness below."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def summands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[float]:
    """Sizes of what cancels in out, dq, dk, dv, times how much a score's rounding moves it."""
    scale = q.shape[-1] ** -0.5
    scores = scale * (q.double() @ k.double().mT)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mass = scores.masked_fill(future, float("-inf")).softmax(-1).sum(-2).max()  # of one column
    score = 1 + scores.abs().max()
    dp = scale * dout.double().norm(dim=-1).max() * v.double().norm(dim=-1).max()
    parts = (v.abs().max(), dp * k.abs().max(), mass * dp * q.abs().max(), mass * dout.abs().max())
    return [float(score * part) for part in parts]


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, strided: bool = False
) -> None:
    """Output and three gradients against fp64; ``strided`` keeps the inputs' own memory layout."""
    results = []
    for dtype, ours in ((q.dtype, True), (q.dtype, False), (torch.float64, False)):
        own = strided and ours
        inputs = [t.requires_grad_() for t in (q, k, v)] if own else leaves(q, k, v, dtype=dtype)
        out = flash_attention(*inputs) if ours else plain(*inputs)
        out.backward(dout.to(dtype) if dout.stride(-1) else dout)
        results.append((out, *(t.grad for t in inputs)))
        q, k, v = (t.detach() for t in (q, k, v))
    names, terms = ("out", "dq", "dk", "dv"), summands(q, k, v, dout)
    for name, kernel, witness, oracle, size in zip(names, *results, terms, strict=True):
        assert_close(kernel, witness, oracle, name, size)


def qkv(
    *shape: int, dtype: torch.dtype = torch.float32, magnitude: float = 1.0
) -> list[torch.Tensor]:
    return [(magnitude * torch.randn(shape)).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("seq_len", [1, 2, 16, 33, 67, 96])
def test_matches_fp64(
    backend: str, seq_len: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    shape = (2, 2, seq_len, head_dim)
    check(*qkv(*shape), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq_len", [1, 45])
def test_low_precision_storage(backend: str, seq_len: int, dtype: torch.dtype) -> None:
    shape = (1, 2, seq_len, 32)
    check(*qkv(*shape, dtype=dtype), torch.randn(shape).to(dtype))


@pytest.mark.parametrize("magnitude", [1e-3, 3.0, 30.0])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    """Scores up to thousands: one-hot rows, large negative log-sum-exps."""
    check(*qkv(1, 2, 40, 32, magnitude=magnitude), torch.randn(1, 2, 40, 32))


def test_packed_projection_and_stride_0_gradient(backend: str) -> None:
    """q, k, v as views of one (B, S, 3, H, D) projection, gradient from ``.sum()``."""
    packed = torch.randn(2, 35, 3, 2, 32, requires_grad=True)
    double = packed.detach().double().requires_grad_()
    flash_attention(*packed.permute(2, 0, 3, 1, 4).unbind(0)).sum().backward()
    plain(*double.permute(2, 0, 3, 1, 4).unbind(0)).sum().backward()
    witness = packed.detach().clone().requires_grad_()
    plain(*witness.permute(2, 0, 3, 1, 4).unbind(0)).sum().backward()
    assert_close(packed.grad, witness.grad, double.grad, terms=100.0)


def test_strided_last_dimension_and_gradient(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 32, 20).transpose(2, 3) for _ in range(3))
    check(q, k, v, torch.randn(1, 2, 32, 20).transpose(2, 3), strided=True)


def test_the_first_row_sees_only_itself(backend: str) -> None:
    q, k, v = qkv(1, 1, 50, 32)
    assert torch.allclose(flash_attention(q, k, v)[:, :, 0], v[:, :, 0], atol=1e-6)


def test_the_future_has_no_influence(backend: str) -> None:
    """Causality by interference: NaN in the future must not reach the past."""
    q, k, v = qkv(1, 1, 50, 32)
    before = flash_attention(q, k, v)
    k[:, :, 30:], v[:, :, 30:] = 7.0, -9.0
    assert torch.equal(flash_attention(q, k, v)[:, :, :30], before[:, :, :30])


def test_neighbours_in_memory_are_not_touched(backend: str) -> None:
    """A sequence in the middle of a NaN buffer: reads stay inside it."""
    buffer = torch.full((3, 2, 40, 32), float("nan"))
    inner = buffer[1:2, :, 3:36]
    inner.copy_(torch.randn(inner.shape))
    inner = inner.detach().requires_grad_()
    out = flash_attention(inner, inner, inner)
    out.sum().backward()
    assert out.isfinite().all()
    assert inner.grad.isfinite().all()


def test_repeats_bit_for_bit(backend: str) -> None:
    q, k, v = qkv(2, 2, 70, 32)
    dout = torch.randn(2, 2, 70, 32)
    grads = []
    for _ in range(2):
        inputs = leaves(q, k, v)
        flash_attention(*inputs).backward(dout)
        grads.append([t.grad for t in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_scale_and_output_layout(backend: str) -> None:
    q, k, v = qkv(2, 3, 20, 32)
    out = flash_attention(q, k, v, scale=0.05)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.05)
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()


def test_empty(backend: str) -> None:
    inputs = leaves(*qkv(0, 2, 8, 32))
    flash_attention(*inputs).sum().backward()
    assert all(t.grad.shape == (0, 2, 8, 32) for t in inputs)


def test_log_sum_exp(backend: str) -> None:
    q, k, v = qkv(2, 2, 37, 32)
    _, lse = torch.ops.stoker.attention_fwd(q, k, v, 0.2)
    scores = (0.2 * (q.double() @ k.double().mT)).masked_fill(
        torch.ones(37, 37, dtype=torch.bool).triu(1), float("-inf")
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    inputs = leaves(*qkv(1, 1, 4, 32), dtype=torch.float64)
    assert torch.autograd.gradcheck(flash_attention, inputs)
    out, _ = reference.attention_fwd(*inputs, reference.Options(32**-0.5))
    assert_close(out, out, F.scaled_dot_product_attention(*inputs, is_causal=True))


def test_errors() -> None:
    q, k, v = qkv(1, 1, 4, 32)
    with pytest.raises(ValueError, match=r"q must be \(B, H, S, D\)"):
        flash_attention(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="k and v must have one shape"):
        flash_attention(q, k[:, :, :3], v)
    with pytest.raises(ValueError, match="k must match q in batch"):
        flash_attention(q, k[:0], v[:0])
    with pytest.raises(ValueError, match="v must match q"):
        flash_attention(q, k, v.half())
    with pytest.raises(ValueError, match="head dimension 16"):
        flash_attention(q[..., :16], k[..., :16], v[..., :16])
