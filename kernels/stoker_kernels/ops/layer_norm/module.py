"""LayerNorm as modules with their own weights."""

from __future__ import annotations

import torch

from stoker_kernels.ops.layer_norm.autograd import layer_norm
from stoker_kernels.philox import threshold_of


class LayerNorm(torch.nn.Module):
    """:func:`layer_norm` with a learned weight (dim,), ones at the start, and bias (dim,), zeros."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.bias = torch.nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., dim) -> (..., dim)."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class DropoutAddLayerNorm(LayerNorm):
    """A block's end and the next one's beginning: dropout, the sum with the residual stream, LayerNorm."""

    def __init__(
        self, dim: int, dropout_p: float = 0.0, eps: float = 1e-5, bias: bool = True
    ) -> None:
        super().__init__(dim, eps, bias)
        threshold_of(dropout_p, "DropoutAddLayerNorm: dropout_p")
        self.dropout_p = dropout_p

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual (..., dim) -> (normalised, residual stream), both (..., dim)."""
        out = layer_norm(
            x, self.weight, self.bias, eps=self.eps, residual=residual,
            dropout_p=self.dropout_p, training=self.training,
        )  # fmt: skip
        return out if isinstance(out, tuple) else (out, x)
