"""Softmax cross-entropy in PyTorch: the specification, which the op also runs on the CPU.

Per row x of V logits with class t, in fp32 (fp64 for fp64 logits):
    lse = log(sum(exp(x))),  loss = lse - x[t],  dx = dloss * (exp(x - lse) - onehot(t))
Rows whose class is ``ignore_index`` have loss 0 and gradient 0.
"""

from __future__ import annotations

import torch

from stoker_kernels._runtime import compute_dtype


def cross_entropy_fwd(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (T, V), target (T,) -> loss (T,), lse (T,), both in the compute dtype."""
    wide = logits.to(compute_dtype(logits.dtype))
    ignored = target == ignore_index
    # log_softmax is one fused pass on the CPU, twice as fast as logsumexp; their maxima differ by lse.
    log_p = torch.log_softmax(wide, -1)
    lse = wide.amax(-1).sub_(log_p.amax(-1))
    picked = log_p.gather(1, target.masked_fill(ignored, 0)[:, None]).squeeze(1)
    return picked.neg_().masked_fill_(ignored, 0.0), lse


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """dloss (T,), logits (T, V), target (T,), lse (T,) -> dlogits (T, V), a new tensor."""
    ignored = target == ignore_index
    scale = dloss.to(lse.dtype).masked_fill(ignored, 0.0)[:, None]
    # exp(x - lse), in one fused pass on the CPU.
    grad = torch.softmax(logits.to(lse.dtype), -1).mul_(scale)
    grad.scatter_add_(1, target.masked_fill(ignored, 0)[:, None], -scale)
    if ignored.any():  # 0 * inf in an ignored row
        grad.masked_fill_(ignored[:, None], 0.0)
    return grad.to(logits.dtype)
