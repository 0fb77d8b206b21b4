"""RMSNorm's torch side: opaque ops with fakes, the autograd Function, the function and the module."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.rms_norm import reference
from stoker_kernels.runtime.backend import (
    Backend,
    backend_for,
    check_devices,
    check_weight,
    compute_dtype,
    register_op,
)


def _fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.rms_norm import triton

        return triton.rms_norm_fwd(x, residual, weight, eps, offset)
    x = x.contiguous()
    return reference.rms_norm_fwd(
        x, None if residual is None else residual.contiguous(), weight, eps, offset
    )


def _fwd_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), h, x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))


def _bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(h) is Backend.TRITON:
        from stoker_kernels.ops.rms_norm import triton

        return triton.rms_norm_bwd(dy, dh, h, weight, rstd, offset)
    return reference.rms_norm_bwd(dy, dh, h.contiguous(), weight, rstd, offset)


def _bwd_fake(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = h.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return h.new_empty(h.shape), dw


_FWD = register_op(
    "rms_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset=0.0)"
    " -> (Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "rms_norm_bwd",
    "(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float offset=0.0)"
    " -> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _RMSNormFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, rstd = _FWD(x, None, weight, eps, offset)
        return y, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, _, ctx.offset = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = _BWD(dy, None, x, weight, rstd, ctx.offset)
        return dx, None if weight is None else dw, None, None


class _AddRMSNormFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, h, rstd = _FWD(x, residual, weight, eps, offset)
        return y, h, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        _, h, rstd = output
        ctx.save_for_backward(h, inputs[2], rstd)
        ctx.offset = inputs[4]
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)  # nobody may have used h: then its zeros are not read

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        h, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dh, dh, None, None, None
        dx, dw = _BWD(dy, dh, h, weight, rstd, ctx.offset)
        return dx, dx, None if weight is None else dw, None, None


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    residual: None = None,
    offset: float = 0.0,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm over the last dimension of x (..., N), scaled by weight (N,); result in x's dtype.

    The factor is ``offset + weight``, summed in fp32: Gemma's norms have offset 1. Without a weight
    (None) nothing is scaled, and the offset must be 0.
    With ``residual`` (..., N) of x's dtype, one pass computes ``h = x + residual`` and returns
    ``(rms_norm(h), h)``: h is the residual stream for the next block, and its gradient joins in the
    same backward pass. Arithmetic is fp32 whatever the storage dtype. Differentiable once.
    Raises ``ValueError`` when a shape, dtype or device does not match x's, ``TypeError`` for integers.
    """
    check_weight("rms_norm", x, weight, offset)
    check_devices("rms_norm", x, weight=weight, residual=residual)
    if residual is None:
        y: torch.Tensor = _RMSNormFunction.apply(x, weight, eps, offset)[0]
        return y
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: residual must match x, got {tuple(residual.shape)} {residual.dtype} "
            f"for {tuple(x.shape)} {x.dtype}"
        )
    # One tensor passed twice: torch 2.11's compiled autograd.Function halves its gradient. Views differ.
    residual = residual.view_as(residual) if residual is x else residual
    both: tuple[torch.Tensor, torch.Tensor]
    both = _AddRMSNormFunction.apply(x, residual, weight, eps, offset)[:2]
    return both


class RMSNorm(torch.nn.Module):
    """:func:`rms_norm` with a learned weight (dim,), at the start ``1 - offset``; none if not ``affine``."""

    def __init__(
        self, dim: int, eps: float = 1e-6, *, offset: float = 0.0, affine: bool = True
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((dim,), 1.0 - offset)) if affine else None
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., dim) -> (..., dim)."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset)
