"""Softmax cross-entropy in PyTorch: the specification, which the op also runs on the CPU.

Per row x of V logits with class t, smoothing s and z-weight w, in fp32 (fp64 for fp64 logits):
    lse  = max(x) + log(sum(exp(x - max(x)))),  log p = x - lse
    loss = -(1 - s) * log p[t] - s * mean(log p) + w * lse^2
    dx   = dloss * ((1 + 2 * w * lse) * p - (1 - s) * onehot(t) - s / V)
Smoothing: Szegedy et al. 2015 (arXiv 1512.00567), as in torch; z-loss: Chowdhery et al. 2022 (PaLM).
Rows whose class is ``ignore_index`` have loss 0 and gradient 0. Between the passes the two terms of lse
are kept apart: their sum would round off what p = exp(x - max(x)) / sum needs when max(x) is large.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype


def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map logits (T, V), target (T,) -> loss (T,), statistics (T, 2), both in the compute dtype.

    The statistics are the two terms of lse; those of ignored rows are anything.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    # log_softmax is one fused pass on the CPU, twice as fast as logsumexp; their maxima differ by lse.
    log_p = torch.log_softmax(wide, -1)
    statistics = torch.stack([wide.amax(-1), log_p.amax(-1).neg_()], -1)
    lse = statistics.sum(-1)
    return _loss(log_p, lse, target, ignore_index, label_smoothing, z_loss), statistics


def _loss(
    log_p: torch.Tensor,
    lse: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    ignored = target == ignore_index
    loss = log_p.gather(1, target.masked_fill(ignored, 0)[:, None]).squeeze(1).neg_()
    if label_smoothing:
        loss.mul_(1.0 - label_smoothing).sub_(log_p.mean(-1), alpha=label_smoothing)
    if z_loss:
        loss.add_(lse.square(), alpha=z_loss)
    return loss.masked_fill_(ignored, 0.0)


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Map dloss (T,), logits (T, V), target (T,), statistics (T, 2) -> dlogits (T, V), a new tensor."""
    # exp(x - lse), in one fused pass on the CPU.
    p, lse = torch.softmax(logits.to(statistics.dtype), -1), statistics.sum(-1)
    return _gradient_(p, lse, dloss, target, ignore_index, label_smoothing, z_loss).to(logits.dtype)


def _gradient_(
    p: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Return the gradient, over the probabilities."""
    ignored = target == ignore_index
    scale = dloss.to(lse.dtype).masked_fill(ignored, 0.0)[:, None]  # (T, 1)
    grad = p.mul_(scale * (1.0 + 2.0 * z_loss * lse[:, None]) if z_loss else scale)
    if label_smoothing:
        grad.sub_(scale, alpha=label_smoothing / p.shape[-1])
    index = target.masked_fill(ignored, 0)[:, None]
    grad.scatter_add_(1, index, scale * (label_smoothing - 1.0))
    if ignored.any():  # 0 * inf in an ignored row
        grad.masked_fill_(ignored[:, None], 0.0)
    return grad


def cross_entropy_fused_(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Return the forward's loss (T,), and the backward's gradient written over the logits."""
    wide = logits.to(compute_dtype(logits.dtype))
    log_p = torch.log_softmax(wide, -1)
    lse = wide.amax(-1).sub_(log_p.amax(-1))
    loss = _loss(log_p, lse, target, ignore_index, label_smoothing, z_loss)
    p = log_p.exp_()
    logits.copy_(_gradient_(p, lse, dloss, target, ignore_index, label_smoothing, z_loss))
    return loss
