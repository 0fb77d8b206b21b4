"""Adasum in PyTorch: the specification, and the CPU implementation.

Formula (Maleki et al. 2021), for one layer's gradients a and b of two workers:
    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
the sum where they are orthogonal, their mean where they are equal. A gradient of norm zero adds nothing and
takes nothing away: both coefficients are 1. Dots are summed in fp64.
"""

from __future__ import annotations

import torch


def coefficients(ab: torch.Tensor, aa: torch.Tensor, bb: torch.Tensor) -> torch.Tensor:
    """Map the dots a.b, |a|^2 and |b|^2, fp64 scalars -> what a and b are multiplied by (2,) fp64."""
    squares = torch.stack([aa, bb])
    return torch.where(squares == 0, 1.0, 1.0 - ab / (2.0 * squares))


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Map a, b (n,) -> their combination (n,) in a's dtype."""
    x, y = a.double(), b.double()
    scale = coefficients(x @ y, x @ x, y @ y)
    return (scale[0] * x + scale[1] * y).to(a.dtype)
