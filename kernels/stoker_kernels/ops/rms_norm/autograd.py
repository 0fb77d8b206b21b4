"""RMSNorm's torch side: opaque ops with fakes, the autograd Function, the function and the module."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels._runtime import Backend, backend_for, compute_dtype, register_op
from stoker_kernels.ops.rms_norm import reference


def _fwd(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.rms_norm import triton

        return triton.rms_norm_fwd(x, weight, eps)
    return reference.rms_norm_fwd(x.contiguous(), weight, eps)


def _fwd_fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))


def _bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.rms_norm import triton

        return triton.rms_norm_bwd(dy, x, weight, rstd)
    return reference.rms_norm_bwd(dy, x.contiguous(), weight, rstd)


def _bwd_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_FWD = register_op(
    "rms_norm_fwd", "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _fwd, _fwd_fake
)
_BWD = register_op(
    "rms_norm_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd = _FWD(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = _BWD(dy, x, weight, rstd)
        return dx, dw, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension of x (..., N), scaled by weight (N,); result in x's dtype.

    Arithmetic is fp32 whatever the storage dtype. Differentiable once in x and weight.
    Raises ``ValueError`` when weight does not match x's last dimension.
    """
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have shape (N,) for x (..., N), "
            f"got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    y: torch.Tensor = _RMSNormFunction.apply(x, weight, eps)
    return y


class RMSNorm(torch.nn.Module):
    """:func:`rms_norm` with a learned weight (dim,), ones at the start."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., dim) -> (..., dim)."""
        return rms_norm(x, self.weight, eps=self.eps)
