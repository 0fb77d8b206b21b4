"""Scaled, masked and causal softmax in PyTorch: the specification, and the CPU implementation.

Formulas, per row of S_k values, everything in fp32 (fp64 for fp64 inputs):
    s  = scale * x where an element is kept, -inf elsewhere
    y  = exp(s - max(s)) / sum(exp(s - max(s))), exactly 0 where an element is not kept
    dx = scale * y * (dy - sum(dy * y))                  (the softmax's Jacobian, diag(y) - y y^T)
An element (q, k) is kept when the mask is True there and, for causal softmax, k <= q + S_k - S_q: the
last query sees every key. A row of which nothing is kept, or that is -inf throughout, is 0 with
gradient 0.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype


def kept(x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """Return which elements of x take part: bool that broadcasts to x's shape; None for all."""
    if not causal:
        return mask
    past = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    past = past.tril(x.shape[-1] - x.shape[-2])
    return past if mask is None else past & mask


def softmax_fwd(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """Map x (..., S_q, S_k), mask bool that broadcasts to it -> y, as x."""
    keep = kept(x, mask, causal)
    if not x.numel():
        return x.new_empty(x.shape)
    scores = x.to(compute_dtype(x.dtype)) * scale
    dropped = None if keep is None else ~keep
    if dropped is not None:
        scores = scores.masked_fill_(dropped, float("-inf"))
    y = torch.softmax(scores, -1)
    y = y.masked_fill_(scores.amax(-1, keepdim=True) == float("-inf"), 0.0)
    if dropped is not None:
        y = y.masked_fill_(dropped, 0.0)  # zero even where the row's sum is NaN
    return y.to(x.dtype)


def softmax_bwd(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Map dy, y (..., S_q, S_k) -> dx, as y."""
    wide = y.to(compute_dtype(y.dtype))
    dy = dy.to(wide.dtype)
    seen = kept(y, None, causal)
    if seen is not None:
        dy = dy.masked_fill(~seen, 0.0)  # whatever is there, NaN included, it is not looked at
    total = (dy * wide).sum(-1, keepdim=True)
    return (dy - total).mul_(wide).mul_(scale).to(y.dtype)
