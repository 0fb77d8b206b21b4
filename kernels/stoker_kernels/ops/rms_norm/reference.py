"""RMSNorm in PyTorch: the specification, and the CPU implementation.

Formulas (Zhang & Sennrich 2019), per row of N values, everything in fp32 (fp64 for fp64 inputs):
    rstd = 1 / sqrt(mean(x^2) + eps),  xhat = x * rstd,  y = xhat * w
    dw   = sum over rows of dy * xhat
    dx   = rstd * (dy * w - xhat * mean(dy * w * xhat))
The weight multiplies before the result is rounded to x's dtype.
"""

from __future__ import annotations

import torch

from stoker_kernels._runtime import compute_dtype


def rms_norm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., N), weight (N,) -> y (..., N) in x's dtype, rstd (...) in the compute dtype."""
    wide = x.to(compute_dtype(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (wide * rstd).mul_(weight.to(wide.dtype))
    return y.to(x.dtype), rstd.squeeze(-1)


def rms_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy, x (..., N), weight (N,), rstd (...) -> dx (..., N), dw (N,) in their inputs' dtypes."""
    n = x.shape[-1]
    wide = x.to(rstd.dtype).reshape(-1, n)
    dy_rows = dy.to(rstd.dtype).reshape(-1, n)
    rstd_rows = rstd.reshape(-1, 1)
    xhat = wide * rstd_rows
    product = dy_rows * xhat
    dw = product.sum(0)
    mean = product.mul_(weight.to(rstd.dtype)).sum(-1, keepdim=True).div_(n)
    dx = torch.mul(dy_rows, weight.to(rstd.dtype), out=product)
    dx.addcmul_(xhat, mean, value=-1.0).mul_(rstd_rows)
    return dx.to(x.dtype).view(x.shape), dw.to(weight.dtype)
