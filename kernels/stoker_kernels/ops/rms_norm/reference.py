"""RMSNorm in PyTorch: the specification, and the CPU implementation.

Formulas (Zhang & Sennrich 2019), per row of N values, everything in fp32 (fp64 for fp64 inputs):
    h    = x + residual                (x alone without a residual), rounded to x's dtype
    rstd = 1 / sqrt(mean(h^2) + eps),  hhat = h * rstd,  y = hhat * w
    w    = offset + weight             (Gemma's offset is 1; 1 without a weight)
    dw   = sum over rows of dy * hhat
    dx   = rstd * (dy * w - hhat * mean(dy * w * hhat)) + dh = dresidual
where dh is the gradient that reaches h itself, the residual stream of the next layer.
The weight multiplies before the result is rounded to x's dtype.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype


def scale_of(weight: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """Return offset + weight in ``dtype``: the factor of every row."""
    wide = weight.to(dtype)
    return wide + offset if offset else wide


def rms_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map x, residual (..., N), weight (N,) -> y (..., N), h (..., N) in x's dtype, rstd (...).

    Without a residual h is empty: the caller has it, as x.
    """
    h = x if residual is None else x + residual
    wide = h.to(compute_dtype(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = wide * rstd
    if weight is not None:
        y.mul_(scale_of(weight, offset, wide.dtype))
    return y.to(x.dtype), x.new_empty(0) if residual is None else h, rstd.squeeze(-1)


def rms_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map dy, dh, h (..., N), weight (N,), rstd (...) -> dx (..., N), dw (N,) in their inputs' dtypes.

    Without a weight dw is empty.
    """
    n = h.shape[-1]
    wide = h.to(rstd.dtype).reshape(-1, n)
    dy_rows = dy.to(rstd.dtype).reshape(-1, n)
    rstd_rows = rstd.reshape(-1, 1)
    hhat = wide * rstd_rows
    product = dy_rows * hhat
    if weight is None:
        dw = h.new_empty(0)
        mean = product.sum(-1, keepdim=True).div_(n)
        dx = product.copy_(dy_rows)
    else:
        dw = product.sum(0).to(weight.dtype)
        w = scale_of(weight, offset, rstd.dtype)
        mean = product.mul_(w).sum(-1, keepdim=True).div_(n)
        dx = torch.mul(dy_rows, w, out=product)
    dx.addcmul_(hhat, mean, value=-1.0).mul_(rstd_rows)
    if dh is not None:
        dx += dh.reshape(-1, n)
    return dx.to(h.dtype).view(h.shape), dw
