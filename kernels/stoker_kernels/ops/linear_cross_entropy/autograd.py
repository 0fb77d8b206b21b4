"""Fused linear cross-entropy's torch side: the opaque op, two autograd Functions, function and module."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.cross_entropy.autograd import Reduction, check_settings
from stoker_kernels.ops.linear_cross_entropy import chunked, reference
from stoker_kernels.ops.linear_cross_entropy.reference import Result, Settings, Wanted
from stoker_kernels.runtime.backend import (
    Backend,
    autocast_dtype,
    backend_for,
    check_devices,
    compute_dtype,
    register_op,
)

NAME = "linear_cross_entropy"


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    dloss: torch.Tensor | None,
    dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    accumulate_in_fp32: bool,
    wanted: list[bool],
) -> Result:
    settings = Settings(dtype, ignore_index, label_smoothing, z_loss, chunk, accumulate_in_fp32)
    run = reference if backend_for(x) is Backend.REFERENCE else chunked
    # Every dtype is chosen here; autocast would round the fp32 products, and knows no meta device.
    meta = x.device.type == "meta"
    with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
        return run.linear_cross_entropy(x, weight, bias, target, dloss, settings, Wanted(*wanted))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    dloss: torch.Tensor | None,
    dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    accumulate_in_fp32: bool,
    wanted: list[bool],
) -> Result:
    settings = Settings(dtype, accumulate_in_fp32=accumulate_in_fp32)
    wide = compute_dtype(dtype)
    want_x, want_weight, want_bias = wanted
    return (
        x.new_empty(x.shape[:1], dtype=wide),
        x.new_empty(x.shape if want_x else 0),
        weight.new_empty(weight.shape if want_weight else 0, dtype=settings.accumulator),
        weight.new_empty(weight.shape[:1] if want_bias else 0, dtype=wide),
    )


_OP = register_op(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? dloss, ScalarType dtype, "
    "int ignore_index, float label_smoothing, float z_loss, int chunk, bool accumulate_in_fp32, "
    "bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _call,
    _fake,
)


def _scaled(grad: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute grad * scale in ``dtype``, in fp32 and in one pass."""
    out = grad.new_empty(grad.shape, dtype=dtype)
    # With the gradient's rank the scale is not rounded to a narrow dtype first, as a 0-d tensor is.
    return torch.mul(grad, scale.reshape([1] * grad.ndim), out=out)


class _ReducedFunction(torch.autograd.Function):
    """The sum or the mean: gradients are made in the forward, the backward scales them."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        settings: Settings,
        mean: bool,
        wanted: Wanted,
    ) -> tuple[torch.Tensor, ...]:
        # Of the sum, so that fp16 keeps what it would lose to a division by the number of tokens.
        loss, *grads = _OP(x, weight, bias, target, None, *settings, list(wanted))
        total: torch.Tensor = loss.sum()
        count = (target != settings.ignore_index).sum() if mean else total.new_ones(())
        return (total / count if mean else total.clone(), count, *grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, bias, *_, ctx.wanted = inputs
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(
            False
        )  # zeros for the held gradients' own would be as large as they
        ctx.dtypes = (x.dtype, weight.dtype, x.dtype if bias is None else bias.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if dloss is None:
            return (None,) * 7
        count, *grads = ctx.saved_tensors
        scale = dloss / count.clamp(min=1)  # all ignored: the loss is NaN, the gradients are 0
        out = [
            _scaled(grad, scale, dtype) if wanted else None
            for grad, dtype, wanted in zip(grads, ctx.dtypes, ctx.wanted, strict=True)
        ]
        return (*out, None, None, None, None)


class _PerRowFunction(torch.autograd.Function):
    """One loss per row: the backward makes the logits again, and weighs each row by its gradient."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        settings: Settings,
        wanted: Wanted,
    ) -> torch.Tensor:
        loss: torch.Tensor = _OP(x, weight, bias, target, None, *settings, [False] * 3)[0]
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.settings, ctx.wanted = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        wanted = ctx.wanted
        _, dx, dw, db = _OP(x, weight, bias, target, dloss, *ctx.settings, list(wanted))
        return (
            dx if wanted.x else None,
            dw.to(weight.dtype) if wanted.weight else None,
            db.to(bias.dtype) if wanted.bias else None,
            None,
            None,
            None,
        )


def _operand_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of logits and GEMM operands: autocast's inside it, else the inputs' one dtype."""
    autocast = autocast_dtype(x)
    if autocast is not None and x.dtype != torch.float64:
        return autocast
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"{NAME}: x, weight and bias must have one dtype outside autocast, got {x.dtype}, "
            f"{weight.dtype}{'' if bias is None else f', {bias.dtype}'}"
        )
    return x.dtype


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    accumulate_in_fp32: bool = True,
) -> torch.Tensor:
    """Compute ``cross_entropy(F.linear(x, weight, bias), target)`` without ever holding all logits.

    x (..., H), weight (V, H), bias (V,), integer classes target (...). Loss, smoothing, z-loss, ignored
    rows and classes out of range are as in :func:`stoker_kernels.cross_entropy`; the loss is fp32.

    The logits exist ``chunk`` tokens at a time, by default about as many as make them as large as x
    (``chunked.chunk_size``). For ``mean`` and ``sum`` the gradients are made in the forward when an
    input requires one, and scaled in the backward; until then they are held, the weight's with 4 bytes
    per value. For ``none`` the backward makes the logits again (8 * T * H * V flops instead of 6),
    because each row has its own upstream gradient. When no row counts, ``mean`` is NaN as in torch and
    all gradients are 0. The weight's gradient is summed over the chunks in fp32; in the
    operands' dtype with ``accumulate_in_fp32=False``, which saves memory and loses bits at every chunk
    (in fp16 it may overflow).

    Under autocast the operands and logits have its dtype, and gradients the dtype of their inputs: an
    fp32 weight gets the fp32 sum, never rounded. Otherwise x, weight and bias must have one dtype.
    Differentiable once in x, weight and bias.

    Raises ``ValueError`` or ``TypeError`` naming the argument that does not fit.
    """
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{NAME}: weight must have shape (V, H) for x (..., H), "
            f"got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not weight.shape[0]:
        raise ValueError(f"{NAME}: weight must have at least one class, got {tuple(weight.shape)}")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{NAME}: target must have x's shape without its last dimension, "
            f"got {tuple(target.shape)} for x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{NAME}: bias must have shape (V,), got {tuple(bias.shape)} for V = {weight.shape[0]}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{NAME}: chunk must be a positive number of tokens, got {chunk}")
    check_devices(NAME, x, weight=weight, target=target, bias=bias)
    check_settings(NAME, target, reduction, label_smoothing, z_loss)
    settings = Settings(
        _operand_dtype(x, weight, bias), ignore_index, float(label_smoothing), float(z_loss),
        chunk or 0, accumulate_in_fp32,
    )  # fmt: skip
    grad = torch.is_grad_enabled()
    wanted = Wanted(
        grad and x.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    rows, classes = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    if reduction == "none":
        each: torch.Tensor = _PerRowFunction.apply(rows, weight, bias, classes, settings, wanted)
        return each.view(target.shape)
    mean = reduction == "mean"
    loss: torch.Tensor
    loss = _ReducedFunction.apply(rows, weight, bias, classes, settings, mean, wanted)[0]
    return loss


class LinearCrossEntropy(torch.nn.Module):
    """:func:`linear_cross_entropy` with a learned weight (vocab, dim); assign ``weight`` to tie it."""

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        bias: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: Reduction = "mean",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(dim)  # as nn.Linear starts
        self.weight = torch.nn.Parameter(torch.empty(vocab, dim).uniform_(-bound, bound))
        self.bias = torch.nn.Parameter(torch.empty(vocab).uniform_(-bound, bound)) if bias else None
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.reduction, self.chunk = reduction, chunk

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Map x (..., dim), target (...) -> the loss, () or (...)."""
        return linear_cross_entropy(
            x, self.weight, target, bias=self.bias, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, reduction=self.reduction,
            chunk=self.chunk,
        )  # fmt: skip
