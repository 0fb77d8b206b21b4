"""Cross-entropy's torch side: opaque ops with fakes, the autograd Function, the public function.

The ops work per row; the reduction is ordinary torch on (T,) values, so a non-uniform upstream gradient
(``reduction="none"``) is right by construction.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stoker_kernels.ops.cross_entropy import reference
from stoker_kernels.runtime.backend import (
    Backend,
    backend_for,
    check_devices,
    compute_dtype,
    register_op,
)

Reduction = Literal["mean", "sum", "none"]


def _fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(logits) is Backend.TRITON:
        from stoker_kernels.ops.cross_entropy import triton

        return triton.cross_entropy_fwd(logits, target, ignore_index, label_smoothing, z_loss)
    return reference.cross_entropy_fwd(logits, target, ignore_index, label_smoothing, z_loss)


def _fwd_fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dtype = logits.shape[0], compute_dtype(logits.dtype)
    return logits.new_empty((rows,), dtype=dtype), logits.new_empty((rows, 2), dtype=dtype)


def _bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    settings = ignore_index, label_smoothing, z_loss
    if backend_for(logits) is Backend.TRITON:
        from stoker_kernels.ops.cross_entropy import triton

        return triton.cross_entropy_bwd(dloss, logits, target, statistics, *settings)
    return reference.cross_entropy_bwd(dloss, logits.contiguous(), target, statistics, *settings)


def _bwd_fake(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_FWD = register_op(
    "cross_entropy_fwd",
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing=0.0, float z_loss=0.0)"
    " -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "cross_entropy_bwd",
    "(Tensor dloss, Tensor logits, Tensor target, Tensor statistics, int ignore_index, "
    "float label_smoothing=0.0, float z_loss=0.0) -> Tensor",
    _bwd,
    _bwd_fake,
)


class _CrossEntropyFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, statistics = _FWD(logits, target, ignore_index, label_smoothing, z_loss)
        return loss, statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        logits, target, *settings = inputs
        ctx.save_for_backward(logits, target, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # the statistics' gradient would be written, and not read
        ctx.settings = tuple(settings)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        if dloss is None:
            return None, None, None, None, None
        logits, target, statistics = ctx.saved_tensors
        return _BWD(dloss, logits, target, statistics, *ctx.settings), None, None, None, None


def check_settings(
    op: str, target: torch.Tensor, reduction: str, label_smoothing: float, z_loss: float
) -> None:
    """Check the arguments that all cross-entropies share; raises naming ``op`` and the argument."""
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32, got {target.dtype}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction {reduction!r}: expected mean, sum or none")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if z_loss < 0.0:
        raise ValueError(f"{op}: z_loss must not be negative, got {z_loss}")


def _reduce(rows: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor, reduction: str) -> Any:
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / (~ignored).sum()


@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax cross-entropy of logits (..., V) with integer classes target (...), in nats.

    ``label_smoothing`` in [0, 1] mixes the target with the uniform distribution, as in torch;
    ``z_loss`` adds that multiple of the squared log-sum-exp, reduced alike. With ``return_z_loss`` the
    result is ``(loss, z)``: z is the part of the loss that z_loss added, for logging, without gradient.
    ``mean`` divides by the number of rows that are not ``ignore_index`` (NaN when there is none, as in
    torch); ``none`` returns shape (...). The loss is fp32 for bf16/fp16 logits (torch rounds it to the
    logits' dtype). Unlike torch, classes are the last dimension whatever the rank. A class outside
    [0, V) raises on the CPU and gives NaN on the GPU. Differentiable once in logits, which are never
    overwritten. Ignored rows have gradient 0, whatever their logits.

    Raises ``ValueError`` or ``TypeError`` naming the argument that does not fit.
    """
    if logits.ndim == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target must have logits' shape without its last dimension, "
            f"got {tuple(target.shape)} for logits {tuple(logits.shape)}"
        )
    if not logits.shape[-1]:
        raise ValueError("cross_entropy: logits must have at least one class, got shape (..., 0)")
    check_devices("cross_entropy", logits, target=target)
    check_settings("cross_entropy", target, reduction, label_smoothing, z_loss)
    rows = target.reshape(-1).long()
    if backend_for(logits) is Backend.CPU and not z_loss and not return_z_loss:
        # PyTorch's pair of CPU kernels shares log(p) between the passes, which an op that returns only
        # (T,) values cannot: 0.4 ms against 0.7 ms at 4096 x 256 on two cores.
        wide = logits.to(compute_dtype(logits.dtype)).reshape(-1, logits.shape[-1])
        wide = wide.masked_fill((rows == ignore_index)[:, None], 0.0)  # torch's 0 * NaN is NaN
        native = F.cross_entropy(
            wide, rows, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        return native.view(target.shape) if reduction == "none" else native
    per_row, statistics = _CrossEntropyFunction.apply(
        logits.reshape(-1, logits.shape[-1]), rows, ignore_index, label_smoothing, z_loss
    )
    ignored = rows == ignore_index
    loss: torch.Tensor = _reduce(per_row, target, ignored, reduction)
    if not return_z_loss:
        return loss
    z: torch.Tensor = _reduce(
        statistics.sum(-1).square().mul(z_loss).masked_fill(ignored, 0.0),
        target,
        ignored,
        reduction,
    )
    return loss, z
