"""The fused dense layers' torch side: opaque ops with fakes, the autograd Functions, the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.gemm.fused_dense import reference
from stoker_kernels.ops.glu.reference import halves
from stoker_kernels.runtime.backend import (
    Backend,
    autocast_dtype,
    backend_for,
    check_devices,
    compute_dtype,
    register_op,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTIVATIONS = {"none": "none", "silu": "silu", "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh"}
"""The kernels' names by the public ones; "gelu" is torch's default, by erf."""


def _fwd(x: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.gemm.fused_dense import triton

        return triton.fused_dense_fwd(x, *given, **named)
    return reference.fused_dense_fwd(x, *given, **named)


def _fwd_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dtype = x.shape[:-1], (x if residual is None else residual).dtype
    z = x.new_empty((rows.numel(), weight.shape[0]) if save else 0)
    return x.new_empty((*rows, weight.shape[0]), dtype=dtype), z


def _glu_fwd(x: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.gemm.fused_dense import triton

        return triton.fused_glu_dense_fwd(x, *given, **named)
    return reference.fused_glu_dense_fwd(x, *given, **named)


def _glu_fwd_fake(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns, rows = gate_weight.shape[0], x.shape[:-1]
    z = x.new_empty((rows.numel(), 2 * columns) if save else 0)
    return x.new_empty((*rows, columns), dtype=(x if residual is None else residual).dtype), z


def _bwd(
    dy: torch.Tensor, z: torch.Tensor, kind: str, gated: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(z) is Backend.TRITON:
        from stoker_kernels.ops.gemm.fused_dense import triton

        return triton.fused_dense_bwd(dy, z, kind, gated, has_bias)
    return reference.fused_dense_bwd(dy, z, kind, gated, has_bias)


def _bwd_fake(
    dy: torch.Tensor, z: torch.Tensor, kind: str, gated: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    db = z.new_empty(z.shape[1] if has_bias else 0, dtype=compute_dtype(z.dtype))
    return z.new_empty(z.shape), db


_FWD = register_op(
    "fused_dense_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str kind, bool save)"
    " -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_GLU_FWD = register_op(
    "fused_glu_dense_fwd",
    "(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias,"
    " Tensor? residual, str kind, bool save) -> (Tensor, Tensor)",
    _glu_fwd,
    _glu_fwd_fake,
)
_BWD = register_op(
    "fused_dense_bwd",
    "(Tensor dy, Tensor z, str kind, bool gated, bool has_bias) -> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


def _products(
    dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx (as x) and dW (N, K) of z = W x, by PyTorch's own products; None for what is not wanted."""
    dx = (dz @ weight).view(x.shape) if wanted[0] else None
    return dx, dz.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None


class _FusedDenseFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        kind: str,
        save: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = _FWD(x, weight, bias, residual, kind, save)
        return y, z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, bias, residual, ctx.kind, ctx.saved = inputs
        ctx.save_for_backward(x, weight, bias, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.has_residual = residual is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, z = ctx.saved_tensors
        db = None
        if ctx.kind == "none":
            dz = dy.to(x.dtype).reshape(x.numel() // x.shape[-1], weight.shape[0])
            if bias is not None:
                db = dy.reshape(dz.shape).sum(0, dtype=compute_dtype(dy.dtype))
        else:
            if not ctx.saved:
                z = torch.nn.functional.linear(x, weight, bias).reshape(-1, weight.shape[0])
            dz, db = _BWD(dy, z, ctx.kind, False, bias is not None)
        dx, dw = _products(dz, x, weight, ctx.needs_input_grad)
        dresidual = dy if ctx.has_residual else None
        db = None if bias is None or db is None else db.to(bias.dtype)
        return dx, dw, db, dresidual, None, None


class _FusedGLUDenseFunction(torch.autograd.Function):
    """``up_weight`` None: ``weight`` and ``bias`` are packed [gate | up], and so are their gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        up_weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        kind: str,
        save: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, biases = _pair_of(weight, up_weight), _pair_of(bias, up_bias)
        y, z = _GLU_FWD(x, *weights, *biases, residual, kind, save)
        return y, z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        *tensors, residual, ctx.kind, ctx.saved = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.has_residual = residual is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, up_weight, bias, up_bias, z = ctx.saved_tensors
        if not ctx.saved:
            parts = zip(_pair_of(weight, up_weight), _pair_of(bias, up_bias), strict=True)
            z = torch.cat([torch.nn.functional.linear(x, w, b) for w, b in parts], -1)
            z = z.reshape(-1, z.shape[-1])
        dz, db = _BWD(dy, z, ctx.kind, True, bias is not None)
        db = None if bias is None else db.to(bias.dtype)
        dresidual = dy if ctx.has_residual else None
        if up_weight is None:
            dx, dw = _products(dz, x, weight, ctx.needs_input_grad)
            return dx, dw, None, db, None, dresidual, None, None
        dgate, dup = halves(dz)
        of_x, of_gate, of_up, *_ = ctx.needs_input_grad
        dx, dw = _products(dgate, x, weight, (of_x, of_gate))
        more, dw_up = _products(dup, x, up_weight, (of_x, of_up))
        dx = dx if dx is None or more is None else dx.add_(more)
        gate_db, up_db = (None, None) if db is None else (t.clone() for t in halves(db))
        return dx, dw, dw_up, gate_db, up_db, dresidual, None, None


def _pair_of(first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[Any, Any]:
    """Return the gate's and the up projection's weight or bias, of two tensors or one packed."""
    if first is None or second is not None:
        return first, second
    half = first.shape[0] // 2
    return first[:half], first[half:]


def _checked(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    residual: torch.Tensor | None,
    **others: torch.Tensor | None,
) -> None:
    """Raise ``ValueError`` or ``TypeError`` naming what does not fit; ``others`` are the same kind's."""
    check_devices(name, x, weight=weight, residual=residual, **others)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"{name}: weight must be (N, K), K >= 1, for x (..., K), "
            f"got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must be floating point, got {x.dtype}")
    for what, tensor in {"weight": weight, **others}.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name}: {what} must have x's dtype {x.dtype}, got {tensor.dtype}")
        wanted = weight.shape if "weight" in what else weight.shape[:1]
        if tensor.shape != wanted:
            raise ValueError(
                f"{name}: {what} must have shape {tuple(wanted)}, got {tuple(tensor.shape)}"
            )
    if residual is not None and residual.shape != (*x.shape[:-1], columns):
        raise ValueError(
            f"{name}: residual must have shape {(*x.shape[:-1], columns)}, got {tuple(residual.shape)}"
        )


def _kind(name: str, activation: str, known: tuple[str, ...]) -> str:
    if activation not in known:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(known)}, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def _cast(
    x: torch.Tensor, *tensors: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Cast to autocast's dtype, as a linear layer does there."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, list(tensors)
    return x.to(dtype), [None if t is None else t.to(dtype) for t in tensors]


def _wants_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def fused_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Compute ``f(x W^T + bias) + residual`` in one kernel: x (..., K), weight (N, K) -> (..., N).

    ``activation`` f is "none", "silu", "gelu" (by erf) or "gelu_tanh". Sums and epilogue are fp32, the
    result is rounded once, to x's dtype, or to the residual's, which may be wider (an fp32 stream beside
    bf16 layers). For the backward the pre-activation (T, N) is written in x's dtype along with the result;
    with ``recompute`` it is not, and one more GEMM computes it again. Without gradients nothing is kept.
    The backward runs PyTorch's GEMMs, and one kernel for the derivative and the bias' gradient, whose
    sums repeat bit for bit. Under autocast operands are cast as a linear layer's. Differentiable once.
    Raises ``ValueError`` when a shape, dtype, device or activation does not fit, ``TypeError`` for integers.
    """
    kind = _kind("fused_dense", activation, tuple(ACTIVATIONS))
    x, (cast_weight, bias) = _cast(x, weight, bias)
    assert cast_weight is not None
    _checked("fused_dense", x, cast_weight, weight.shape[0], residual, bias=bias)
    residual = residual.view_as(residual) if residual is x else residual
    save = kind != "none" and not recompute and _wants_grad(x, weight, bias)
    y: torch.Tensor = _FusedDenseFunction.apply(x, cast_weight, bias, residual, kind, save)[0]
    return y


def fused_glu_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Compute ``f(x W^T + bias) * (x W_up^T + up_bias) + residual`` in one kernel: (..., K) -> (..., F).

    weight and up_weight are (F, K), as two layers have them; without ``up_weight``, weight (2F, K) and bias
    (2F,) are packed [gate | up], and so are their gradients: one GEMM each instead of two. One program holds
    both accumulators, so the 2F values never pass through memory, but once for the backward (see
    :func:`fused_dense`, also for ``recompute`` and the residual). ``activation`` f is "silu" (SwiGLU),
    "gelu" or "gelu_tanh" (GEGLU). Differentiable once.
    Raises ``ValueError`` when a shape, dtype, device or activation does not fit, ``TypeError`` for integers.
    """
    name = "fused_glu_dense"
    kind = _kind(name, activation, ("silu", "gelu", "gelu_tanh"))
    if up_weight is None and (weight.ndim != 2 or weight.shape[0] % 2 or up_bias is not None):
        raise ValueError(
            f"{name}: without up_weight, weight must be packed (2F, K) and up_bias None, "
            f"got {tuple(weight.shape)}"
        )
    if up_weight is not None and (bias is None) != (up_bias is None):
        raise ValueError(f"{name}: give bias and up_bias, or neither")
    wanted = _wants_grad(x, weight, up_weight, bias, up_bias)
    x, (cast_weight, up_weight, bias, up_bias) = _cast(x, weight, up_weight, bias, up_bias)
    assert cast_weight is not None
    columns = weight.shape[0] // (2 if up_weight is None else 1)
    _checked(
        name, x, cast_weight, columns, residual, up_weight=up_weight, bias=bias, up_bias=up_bias
    )
    residual = residual.view_as(residual) if residual is x else residual
    up_weight = up_weight.view_as(up_weight) if up_weight is weight else up_weight
    y: torch.Tensor = _FusedGLUDenseFunction.apply(
        x, cast_weight, up_weight, bias, up_bias, residual, kind, wanted and not recompute
    )[0]
    return y
