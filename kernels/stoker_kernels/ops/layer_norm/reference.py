"""LayerNorm with dropout and a residual sum in PyTorch: the specification.

Formulas (Ba et al. 2016; the order of dropout, sum and norm is pre-norm GPT's and post-norm BERT's),
per row of N values, everything in fp32 (fp64 for fp64 inputs):
    h    = residual + keep * x / (1 - p)   (without dropout keep is 1 and p is 0; without a residual it
                                           is 0), rounded to x's dtype
    mean = sum(h) / N,  rstd = 1 / sqrt(sum((h - mean)^2) / N + eps)
    hhat = (h - mean) * rstd,  y = hhat * w + b,  w = offset + weight (1 without a weight)
    dw   = sum over rows of dy * hhat,  db = sum over rows of dy
    g    = dy * w
    dresidual = rstd * (g - hhat * mean(g * hhat) - mean(g)) + dh
    dx   = keep * dresidual / (1 - p)
where dh is the gradient that reaches h itself, the residual stream of the next layer, and keep is
``philox.keep_mask`` of the seed, drawn again in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stoker_kernels.primitives.philox import keep_mask, keep_scale_of, threshold_of
from stoker_kernels.runtime.backend import compute_dtype

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Options(NamedTuple):
    """The parts that a call has: dropout by ``seed`` (1,) int64, or None without; a residual; a bias.

    ``offset`` is added to the weight.
    """

    seed: torch.Tensor | None = None
    dropout_p: float = 0.0
    has_residual: bool = False
    has_bias: bool = False
    offset: float = 0.0

    @property
    def threshold(self) -> int:
        """Dropout probability in 2^-16ths."""
        return threshold_of(self.dropout_p, "dropout_p")

    def scale(self, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return w of the formulas in ``dtype``, or None for 1."""
        if weight is None:
            return None
        return weight.to(dtype) + self.offset if self.offset else weight.to(dtype)

    @property
    def keep_scale(self) -> float:
        """The factor of survivors, so that dropout keeps the expectation; 0 when none survive."""
        return keep_scale_of(self.dropout_p)


def dropout_mask(seed: torch.Tensor, shape: torch.Size, dropout_p: float) -> torch.Tensor:
    """Return the survivors among an x of ``shape`` (..., N): bool of that shape, on the seed's device."""
    rows = shape.numel() // max(shape[-1], 1)
    return keep_mask(seed, rows, shape[-1], threshold_of(dropout_p, "dropout_p")).view(shape)


def layer_norm_input(
    x: torch.Tensor, residual: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """Return h of the formulas, in x's dtype; x itself with neither a residual nor dropout."""
    if options.seed is None and residual is None:
        return x
    wide = x.to(compute_dtype(x.dtype))
    if options.seed is not None:
        wide = _dropped(wide, options.seed, options)
    return (wide if residual is None else wide + residual).to(x.dtype)


def through_dropout(
    wide: torch.Tensor, h: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx and dresidual in h's dtype, of the gradient ``wide`` that reached h.

    They are unequal only with dropout; without it dresidual is empty.
    """
    if options.seed is None:
        return wide.to(h.dtype), h.new_empty(0)
    dx = _dropped(wide, options.seed, options)
    return dx.to(h.dtype), wide.to(h.dtype) if options.has_residual else h.new_empty(0)


def _dropped(wide: torch.Tensor, seed: torch.Tensor, options: Options) -> torch.Tensor:
    mask = dropout_mask(seed, wide.shape, options.dropout_p)
    return torch.where(mask, wide * options.keep_scale, 0)


def layer_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    options: Options,
) -> Four:
    """Map x, residual (..., N), weight, bias (N,) -> y, h (..., N) in x's dtype, mean, rstd (...).

    With neither a residual nor dropout h is empty: the caller has it, as x.
    """
    h = layer_norm_input(x, residual, options)
    wide = h.to(compute_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    wide = wide - mean
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = wide * rstd
    scale = options.scale(weight, wide.dtype)
    if scale is not None:
        y.mul_(scale)
    if bias is not None:
        y += bias
    h = x.new_empty(0) if h is x else h
    return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    options: Options,
) -> Four:
    """Map dy, dh, h (..., N), weight (N,), mean, rstd (...) -> dx, dresidual (..., N), dw, db (N,).

    Without dropout dresidual is dx and returned empty, as are dw without a weight, db without a bias.
    """
    n = h.shape[-1]
    rstd_rows = rstd.reshape(-1, 1)
    dy_rows = dy.to(rstd.dtype).reshape(-1, n)
    hhat = (h.reshape(-1, n) - mean.reshape(-1, 1)).mul_(rstd_rows)
    dw = h.new_empty(0) if weight is None else (dy_rows * hhat).sum(0).to(weight.dtype)
    db = dy_rows.sum(0).to(dw.dtype) if options.has_bias else dw.new_empty(0)
    scale = options.scale(weight, rstd.dtype)
    grad = dy_rows.clone() if scale is None else dy_rows * scale
    mean_of_product = (grad * hhat).mean(-1, keepdim=True)
    wide = grad.sub_(grad.mean(-1, keepdim=True)).addcmul_(hhat, mean_of_product, value=-1.0)
    wide.mul_(rstd_rows)
    if dh is not None:
        wide += dh.reshape(-1, n)
    return (*through_dropout(wide.view(h.shape), h, options), dw, db)
