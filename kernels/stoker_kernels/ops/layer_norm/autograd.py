"""LayerNorm's torch side: opaque ops with fakes, the autograd Functions, the function and the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.layer_norm import cpu, reference
from stoker_kernels.ops.layer_norm.reference import Four, Options
from stoker_kernels.primitives.philox import draw_seed, threshold_of
from stoker_kernels.runtime.backend import (
    Backend,
    backend_for,
    check_devices,
    check_weight,
    compute_dtype,
    register_op,
)

if TYPE_CHECKING:
    from types import ModuleType


def _eager(backend: Backend, h: torch.Tensor) -> ModuleType:
    """Return the module with the eager code.

    PyTorch's fused norm has no empty rows, and of one value it is not exactly 0.
    """
    return cpu if backend is Backend.CPU and h.numel() and h.shape[-1] > 1 else reference


def _fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    offset: float = 0.0,
) -> Four:
    options = Options(seed, dropout_p, residual is not None, bias is not None, offset)
    backend = backend_for(x)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.layer_norm import triton

        return triton.layer_norm_fwd(x, residual, weight, bias, eps, options)
    residual = None if residual is None else residual.contiguous()
    return _eager(backend, x).layer_norm_fwd(x.contiguous(), residual, weight, bias, eps, options)


def _fwd_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    offset: float = 0.0,
) -> Four:
    h = x.new_empty(0 if residual is None and seed is None else x.shape)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), h, mean, rstd


def _bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> Four:
    options, backend = Options(*rest, **named), backend_for(h)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.layer_norm import triton

        return triton.layer_norm_bwd(dy, dh, h, weight, mean, rstd, options)
    return _eager(backend, h).layer_norm_bwd(dy, dh, h.contiguous(), weight, mean, rstd, options)


def _bwd_fake(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> Four:
    options = Options(*rest, **named)
    dresidual = h.new_empty(h.shape if options.has_residual and options.seed is not None else 0)
    dw = h.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return h.new_empty(h.shape), dresidual, dw, dw.new_empty(dw.shape if options.has_bias else 0)


_FWD = register_op(
    "layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps,"
    " float dropout_p, float offset=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "layer_norm_bwd",
    "(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor mean, Tensor rstd,"
    " Tensor? seed, float dropout_p, bool has_residual, bool has_bias, float offset=0.0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _LayerNormFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, ...]:
        y, _, mean, rstd = _FWD(x, None, weight, bias, None, eps, 0.0, offset)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, bias, _, ctx.offset = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.has_bias = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        dx, _, dw, db = _BWD(dy, None, *saved, None, 0.0, False, ctx.has_bias, ctx.offset)
        dw = None if saved[1] is None else dw
        return dx, dw, db if ctx.has_bias else None, None, None


class _DropoutAddLayerNormFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        eps: float,
        dropout_p: float,
        offset: float,
    ) -> Four:
        y, h, mean, rstd = _FWD(x, residual, weight, bias, seed, eps, dropout_p, offset)
        return y, h, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
        _, residual, weight, bias, seed, _, ctx.dropout_p, ctx.offset = inputs
        _, h, mean, rstd = output
        ctx.save_for_backward(h, weight, mean, rstd, seed)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
        ctx.set_materialize_grads(False)  # nobody may have used h: then its zeros are not read

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them only once
        if dy is None:
            dy = torch.zeros_like(saved[0])
        parts = ctx.dropout_p, ctx.has_residual, ctx.has_bias, ctx.offset
        dx, dresidual, dw, db = _BWD(dy, dh, *saved, *parts)
        if saved[4] is None:  # no dropout
            dresidual = dx
        return (
            dx, dresidual if ctx.has_residual else None, None if saved[1] is None else dw,
            db if ctx.has_bias else None, None, None, None, None,
        )  # fmt: skip


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension of x (..., N) with weight, bias (N,); the result is in x's dtype.

    The factor is ``offset + weight``, summed in fp32: NeMo's "1p" norms have offset 1. Without a weight
    (None) there is neither bias nor offset.
    With ``residual`` (..., N) of x's dtype or ``dropout_p`` above 0, one pass computes
    ``h = residual + dropout(x)``, rounded to x's dtype, and returns ``(layer_norm(h), h)``: h is the
    residual stream for the next block, and its gradient joins in the same backward pass. Dropout
    zeroes elements with probability ``dropout_p`` while ``training`` and scales the others by
    1 / (1 - dropout_p). Its mask is a function of ``seed`` (1,) int64 on x's device, drawn from torch's
    generator when None, and is never stored; :func:`dropout_mask` shows it. Arithmetic is fp32
    whatever the storage dtype. Differentiable once.
    Raises ``ValueError`` when a shape, dtype, device or probability does not fit, ``TypeError`` for integers.
    """
    check_weight("layer_norm", x, weight, offset)
    if bias is not None and weight is None:
        raise ValueError("layer_norm: bias needs a weight\npass ones for the weight")
    if (
        bias is not None
        and weight is not None
        and (bias.shape != weight.shape or bias.dtype != weight.dtype)
    ):
        raise ValueError(
            f"layer_norm: bias must match weight, got {tuple(bias.shape)} {bias.dtype} "
            f"for {tuple(weight.shape)} {weight.dtype}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"layer_norm: residual must match x, got {tuple(residual.shape)} {residual.dtype} "
            f"for {tuple(x.shape)} {x.dtype}"
        )
    if seed is not None and (
        seed.shape != (1,) or seed.dtype != torch.int64 or seed.device != x.device
    ):
        raise ValueError(
            f"layer_norm: seed must be (1,) int64 on {x.device}, as philox.draw_seed makes it, got "
            f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
        )
    check_devices("layer_norm", x, weight=weight, bias=bias, residual=residual)
    threshold_of(dropout_p, "layer_norm: dropout_p")
    if not (training and dropout_p):
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    bias = bias.view_as(bias) if bias is not None and bias is weight else bias
    if residual is None and seed is None:
        y: torch.Tensor = _LayerNormFunction.apply(x, weight, bias, eps, offset)[0]
        return (y, x) if dropout_p else y
    # One tensor passed twice: torch 2.11's compiled autograd.Function halves its gradient. Views differ.
    residual = residual.view_as(residual) if residual is x else residual
    both: tuple[torch.Tensor, torch.Tensor] = _DropoutAddLayerNormFunction.apply(
        x, residual, weight, bias, seed, eps, 0.0 if seed is None else dropout_p, offset
    )[:2]
    return both


class LayerNorm(torch.nn.Module):
    """:func:`layer_norm` with a learned weight (dim,), ones at the start, and bias (dim,), zeros."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.bias = torch.nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., dim) -> (..., dim)."""
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
        """Map x, residual (..., dim) -> (normalised, residual stream), both (..., dim)."""
        out = layer_norm(
            x, self.weight, self.bias, eps=self.eps, residual=residual,
            dropout_p=self.dropout_p, training=self.training,
        )  # fmt: skip
        return out if isinstance(out, tuple) else (out, x)
