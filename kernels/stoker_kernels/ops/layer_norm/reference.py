"""LayerNorm with dropout and a residual sum in PyTorch: the specification.

Formulas (Ba et al. 2016; the order of dropout, sum and norm is pre-norm GPT's and post-norm BERT's),
per row of N values, everything in fp32 (fp64 for fp64 inputs):
    h    = residual + keep * x / (1 - p)   (without dropout keep is 1 and p is 0; without a residual it
                                           is 0), rounded to x's dtype
    mean = sum(h) / N,  rstd = 1 / sqrt(sum((h - mean)^2) / N + eps)
    hhat = (h - mean) * rstd,  y = hhat * w + b
    dw   = sum over rows of dy * hhat,  db = sum over rows of dy
    g    = dy * w
    dresidual = rstd * (g - hhat * mean(g * hhat) - mean(g)) + dh
    dx   = keep * dresidual / (1 - p)
where dh is the gradient that reaches h itself, the residual stream of the next layer, and keep is
``philox.keep_mask`` of the seed, drawn again in the backward pass.
"""

from __future__ import annotations

import torch

from stoker_kernels._runtime import compute_dtype
from stoker_kernels.philox import keep_mask, threshold_of


def dropout_mask(seed: torch.Tensor, shape: torch.Size, dropout_p: float) -> torch.Tensor:
    """Which elements of an x of ``shape`` (..., N) survive: bool of that shape, on the seed's device."""
    rows = shape.numel() // max(shape[-1], 1)
    return keep_mask(seed, rows, shape[-1], threshold_of(dropout_p, "dropout_p")).view(shape)


def keep_scale(dropout_p: float) -> float:
    """What survivors are multiplied by, so that dropout keeps the expectation; 0 when none survive."""
    return 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def layer_norm_input(
    x: torch.Tensor, residual: torch.Tensor | None, seed: torch.Tensor | None, dropout_p: float
) -> torch.Tensor:
    """h of the formulas, in x's dtype; x itself with neither a residual nor dropout."""
    if seed is None and residual is None:
        return x
    wide = x.to(compute_dtype(x.dtype))
    if seed is not None:
        wide = torch.where(dropout_mask(seed, x.shape, dropout_p), wide * keep_scale(dropout_p), 0)
    return (wide if residual is None else wide + residual).to(x.dtype)


def through_dropout(
    wide: torch.Tensor,
    h: torch.Tensor,
    seed: torch.Tensor | None,
    dropout_p: float,
    has_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dresidual in h's dtype, of the gradient ``wide`` that reached h; unequal only with dropout."""
    if seed is None:
        return wide.to(h.dtype), h.new_empty(0)
    dx = torch.where(dropout_mask(seed, h.shape, dropout_p), wide * keep_scale(dropout_p), 0)
    return dx.to(h.dtype), wide.to(h.dtype) if has_residual else h.new_empty(0)


def layer_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual (..., N), weight, bias (N,) -> y, h (..., N) in x's dtype, mean, rstd (...).

    ``seed`` (1,) int64, or None for no dropout. With neither a residual nor dropout h is empty: the
    caller has it, as x.
    """
    h = layer_norm_input(x, residual, seed, dropout_p)
    wide = h.to(compute_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    wide = wide - mean
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (wide * rstd).mul_(weight.to(wide.dtype))
    if bias is not None:
        y += bias
    h = x.new_empty(0) if h is x else h
    return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    dropout_p: float,
    has_residual: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, dh, h (..., N), weight (N,), mean, rstd (...) -> dx, dresidual (..., N), dw, db (N,).

    Without dropout dresidual is dx and returned empty, as is db without a bias.
    """
    n = h.shape[-1]
    rstd_rows = rstd.reshape(-1, 1)
    dy_rows = dy.to(rstd.dtype).reshape(-1, n)
    hhat = (h.reshape(-1, n) - mean.reshape(-1, 1)).mul_(rstd_rows)
    dw = (dy_rows * hhat).sum(0).to(weight.dtype)
    db = dy_rows.sum(0).to(weight.dtype) if has_bias else weight.new_empty(0)
    grad = dy_rows * weight.to(rstd.dtype)
    mean_of_product = (grad * hhat).mean(-1, keepdim=True)
    wide = grad.sub_(grad.mean(-1, keepdim=True)).addcmul_(hhat, mean_of_product, value=-1.0)
    wide.mul_(rstd_rows)
    if dh is not None:
        wide += dh.reshape(-1, n)
    return (*through_dropout(wide.view(h.shape), h, seed, dropout_p, has_residual), dw, db)
