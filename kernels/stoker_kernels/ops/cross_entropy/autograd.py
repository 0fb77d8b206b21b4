"""Cross-entropy's torch side: opaque ops with fakes, the autograd Function, the public function.

The ops work per row; the reduction is ordinary torch on (T,) values, so a non-uniform upstream gradient
(``reduction="none"``) is right by construction.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stoker_kernels._runtime import Backend, backend_for, compute_dtype, register_op
from stoker_kernels.ops.cross_entropy import reference


def _fwd(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(logits) is Backend.TRITON:
        from stoker_kernels.ops.cross_entropy import triton

        return triton.cross_entropy_fwd(logits, target, ignore_index)
    return reference.cross_entropy_fwd(logits, target, ignore_index)


def _fwd_fake(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = logits.shape[:1], compute_dtype(logits.dtype)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)


def _bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    if backend_for(logits) is Backend.TRITON:
        from stoker_kernels.ops.cross_entropy import triton

        return triton.cross_entropy_bwd(dloss, logits, target, lse, ignore_index)
    return reference.cross_entropy_bwd(dloss, logits.contiguous(), target, lse, ignore_index)


def _bwd_fake(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_FWD = register_op(
    "cross_entropy_fwd",
    "(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "cross_entropy_bwd",
    "(Tensor dloss, Tensor logits, Tensor target, Tensor lse, int ignore_index) -> Tensor",
    _bwd,
    _bwd_fake,
)


class _CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        loss, lse = _FWD(logits, target, ignore_index)
        ctx.save_for_backward(logits, target, lse)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target, lse = ctx.saved_tensors
        return _BWD(dloss, logits, target, lse, ctx.ignore_index), None, None


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Softmax cross-entropy of logits (..., V) with integer classes target (...), in nats.

    ``mean`` divides by the number of rows that are not ``ignore_index`` (NaN when there is none, as in
    torch); ``none`` returns shape (...). The loss is fp32 for bf16/fp16 logits (torch rounds it to the
    logits' dtype). Unlike torch, classes are the last dimension whatever the rank. A class outside
    [0, V) raises on the CPU and gives NaN on the GPU. Differentiable once in logits, which are never
    overwritten. Ignored rows have gradient 0 (on the CPU only if their logits are finite, as in torch).
    """
    if logits.ndim == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target must have logits' shape without its last dimension, "
            f"got {tuple(target.shape)} for logits {tuple(logits.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cross_entropy: target must be int64 or int32, got {target.dtype}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction {reduction!r}: expected mean, sum or none")
    rows = target.reshape(-1).long()
    if backend_for(logits) is Backend.CPU:
        # PyTorch's pair of CPU kernels shares log(p) between the passes, which an op that returns only
        # (T,) values cannot: 0.4 ms against 0.7 ms at 4096 x 256 on two cores.
        wide = logits.to(compute_dtype(logits.dtype)).reshape(-1, logits.shape[-1])
        native = F.cross_entropy(wide, rows, ignore_index=ignore_index, reduction=reduction)
        return native.view(target.shape) if reduction == "none" else native
    loss: torch.Tensor = _CrossEntropyFunction.apply(
        logits.reshape(-1, logits.shape[-1]), rows, ignore_index
    )
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (rows != ignore_index).sum()
