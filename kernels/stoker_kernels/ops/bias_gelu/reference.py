"""Bias + GELU in PyTorch: the specification, and the CPU implementation.

Formulas (Hendrycks & Gimpel, arXiv 1606.08415), everything in fp32 (fp64 for fp64 inputs), rounded once
to x's dtype; h is never stored:
    h = x + bias,  y = gelu(h)
    dx = dy * gelu'(h),  dbias = sum over rows of dx, taken before dx is rounded
gelu is by tanh ("gelu_tanh"), h (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))) / 2, or by erf ("gelu_erf"),
h (1 + erf(h / sqrt 2)) / 2.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from stoker_kernels.runtime.backend import compute_dtype

APPROXIMATE = {"gelu_tanh": "tanh", "gelu_erf": "none"}  # torch's name of the approximation


def bias_gelu_fwd(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """Map x (..., N), bias (N,) -> y (..., N) in x's dtype."""
    wide = compute_dtype(x.dtype)
    return F.gelu(x.to(wide) + bias.to(wide), approximate=APPROXIMATE[kind]).to(x.dtype)


def bias_gelu_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map dy, x (..., N), bias (N,) -> dx (..., N), dbias (N,) in their inputs' dtypes."""
    wide = compute_dtype(x.dtype)
    h = x.to(wide) + bias.to(wide)
    dx = torch.ops.aten.gelu_backward(dy.to(wide).contiguous(), h, approximate=APPROXIMATE[kind])
    dbias = dx.sum_to_size(bias.shape)
    return dx.to(x.dtype), dbias.to(bias.dtype)
