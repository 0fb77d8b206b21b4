"""Attention's torch side: opaque ops with fakes, the autograd Function, the public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels._runtime import Backend, backend_for, compute_dtype, register_op
from stoker_kernels.ops.attention import reference

HEAD_DIMS = (32, 64, 128)


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    backend = backend_for(q)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.attention import triton

        return triton.attention_fwd(q, k, v, scale)
    if backend is Backend.CPU and q.numel():
        return reference.attention_fwd_cpu(q, k, v, scale)
    return reference.attention_fwd(q, k, v, scale)


def _new_like(q: torch.Tensor) -> torch.Tensor:
    batch, heads, seq_len, head_dim = q.shape
    return q.new_empty((batch, seq_len, heads, head_dim)).transpose(1, 2)


def _fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_like(q), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    backend = backend_for(q)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.attention import triton

        return triton.attention_bwd(dout, q, k, v, out, lse, scale)
    if backend is Backend.CPU and q.numel():
        return reference.attention_bwd_cpu(dout, q, k, v, out, lse, scale)
    return reference.attention_bwd(dout, q, k, v, out, lse, scale)


def _bwd_fake(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_like(q), _new_like(q)


_FWD = register_op(
    "attention_fwd",
    "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, lse = _FWD(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _BWD(dout, q, k, v, out, lse, ctx.scale)
        return dq, dk, dv, None


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Causal self-attention: softmax(scale * q k^T, column <= row) v, per batch and head.

    q, k, v are (B, H, S, D) of one dtype, any strides, D of 32, 64 or 128, any S; the result is
    (B, H, S, D) over (B, S, H, D) memory, so ``out.transpose(1, 2).reshape(B, S, H * D)`` is free.
    ``scale`` defaults to 1/sqrt(D). Memory is O(S); softmax and accumulation are fp32; the backward
    uses no atomics, so gradients repeat bit for bit. Differentiable once.
    Raises ``ValueError`` naming the argument that does not fit.
    """
    if q.ndim != 4:
        raise ValueError(f"flash_attention: q must be (B, H, S, D), got {tuple(q.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"flash_attention: {name} must match q: {tuple(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}, q is {tuple(q.shape)} {q.dtype} on {q.device}"
            )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"flash_attention: head dimension {q.shape[3]}, expected one of {HEAD_DIMS}"
        )
    # One tensor passed twice: torch.compile refuses it, and torch 2.11 halves its gradient. Views differ.
    v = v.view_as(v) if v is q or v is k else v
    k = k.view_as(k) if k is q else k
    out: torch.Tensor = _AttentionFunction.apply(
        q, k, v, 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    )
    return out
