"""Linear layer and cross-entropy in PyTorch with all logits at once: the specification.

    z  = x W^T + b                    (T, V), rounded to the operands' dtype as F.linear rounds
    dz = gradient of cross_entropy    (see ``ops.cross_entropy.reference``), rounded alike
    dx = dz W,  dW = dz^T x,  db = sum over rows of dz
Products are summed in fp32 (fp64 for fp64 operands).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from stoker_kernels.ops.cross_entropy import reference as cross_entropy
from stoker_kernels.runtime.backend import compute_dtype


class Settings(NamedTuple):
    """The options of a call; ``dtype`` is that of logits and GEMM operands, ``chunk`` 0 the heuristic."""

    dtype: torch.dtype
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int = 0
    accumulate_in_fp32: bool = True

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype that the weight's gradient is summed and returned in."""
        return compute_dtype(self.dtype) if self.accumulate_in_fp32 else self.dtype


class Wanted(NamedTuple):
    """The gradients that a call is to make."""

    x: bool = False
    weight: bool = False
    bias: bool = False


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    dloss: torch.Tensor | None,
    settings: Settings,
    wanted: Wanted,
) -> Result:
    """Map x (T, H), weight (V, H), bias (V,), target, dloss (T,) -> loss (T,), dx, dW, db like the inputs.

    Without dloss the gradients are those of the sum of losses. dx has x's dtype, dW the accumulator's,
    loss and db the compute dtype; a gradient that is not wanted is empty.
    """
    dtype, wide = settings.dtype, compute_dtype(settings.dtype)
    x_operand, w_operand = x.to(dtype), weight.to(dtype)
    logits = F.linear(x_operand, w_operand, None if bias is None else bias.to(dtype))
    dloss = x.new_ones((), dtype=wide).expand(x.shape[0]) if dloss is None else dloss
    loss = cross_entropy.cross_entropy_fused_(
        dloss, logits, target, settings.ignore_index, settings.label_smoothing, settings.z_loss
    )
    dx = (logits @ w_operand).to(x.dtype) if wanted.x else x.new_empty(0)
    dw = (
        (logits.t().to(wide) @ x_operand.to(wide)).to(settings.accumulator)
        if wanted.weight
        else x.new_empty(0, dtype=settings.accumulator)
    )
    db = logits.sum(0, dtype=wide) if wanted.bias else x.new_empty(0, dtype=wide)
    return loss, dx, dw, db
