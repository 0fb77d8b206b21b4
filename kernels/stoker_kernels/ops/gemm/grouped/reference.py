"""Grouped products in PyTorch: the specification, and the CPU implementation.

x (T, K) holds the tokens sorted by expert; ``ends`` (E,) int32 is where each expert's tokens end, so
expert e has the rows ends[e - 1] .. ends[e] (from 0 for the first), maybe none; W (E, N, K). In fp32 (fp64
for fp64 inputs), rounded once to x's dtype:
    out[t] = W[e] x[t],   dx[t] = W[e]^T dout[t],   dW[e] = sum over its tokens of dout[t] x[t]^T
Rows past the last expert's are 0, and so is the gradient of a weight that no token was sent to.
Bounds are clamped to 0 .. T and made to rise, so none can lead outside.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stoker_kernels.runtime.backend import compute_dtype

if TYPE_CHECKING:
    import torch


def bounds(ends: torch.Tensor, rows: int) -> list[int]:
    """Return the first row of each expert, and the end of the last's."""
    return [0, *ends.clamp(0, rows).cummax(0).values.tolist()]


def grouped_rows(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Map x (T, K), weight (E, N, K), ends (E,) -> (T, N); ``transposed``: x (T, N) -> (T, K)."""
    wide = compute_dtype(x.dtype)
    out = x.new_zeros((x.shape[0], weight.shape[2 if transposed else 1]))
    for expert, (start, end) in enumerate(pairwise(bounds(ends, x.shape[0]))):
        if end > start:
            one = weight[expert].to(wide)
            out[start:end] = (x[start:end].to(wide) @ (one if transposed else one.t())).to(x.dtype)
    return out


def grouped_weight(dout: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Map dout (T, N), x (T, K), ends (E,) -> dW (E, N, K) in x's dtype."""
    wide = compute_dtype(x.dtype)
    dweight = x.new_zeros((ends.shape[0], dout.shape[1], x.shape[1]))
    for expert, (start, end) in enumerate(pairwise(bounds(ends, x.shape[0]))):
        if end > start:
            product = dout[start:end].to(wide).t() @ x[start:end].to(wide)
            dweight[expert] = product.to(x.dtype)
    return dweight
