"""The gated linear units' torch side: opaque ops with fakes, the autograd Function, functions, modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.glu import reference
from stoker_kernels.runtime.backend import Backend, backend_for, check_devices, register_op

GELU_KINDS = {"tanh": "gelu_tanh", "none": "gelu_erf"}  # by torch's name of the approximation


def _fwd(packed: torch.Tensor, kind: str) -> torch.Tensor:
    if backend_for(packed) is Backend.TRITON:
        from stoker_kernels.ops.glu import triton

        return triton.glu_fwd(packed, kind)
    return reference.glu_fwd(packed.contiguous(), kind)


def _fwd_fake(packed: torch.Tensor, kind: str) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


def _bwd(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    if backend_for(packed) is Backend.TRITON:
        from stoker_kernels.ops.glu import triton

        return triton.glu_bwd(dy, packed, kind)
    return reference.glu_bwd(dy, packed.contiguous(), kind)


def _bwd_fake(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    return packed.new_empty(packed.shape)


_FWD = register_op("glu_fwd", "(Tensor packed, str kind) -> Tensor", _fwd, _fwd_fake)
_BWD = register_op("glu_bwd", "(Tensor dy, Tensor packed, str kind) -> Tensor", _bwd, _bwd_fake)


def _pair_fwd(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    if backend_for(gate) is Backend.TRITON:
        from stoker_kernels.ops.glu import triton

        return triton.glu_pair_fwd(gate, up, kind)
    return reference.glu_pair_fwd(gate.contiguous(), up.contiguous(), kind)


def _pair_fwd_fake(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return gate.new_empty(gate.shape)


def _pair_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(gate) is Backend.TRITON:
        from stoker_kernels.ops.glu import triton

        return triton.glu_pair_bwd(dy, gate, up, kind)
    return reference.glu_pair_bwd(dy.contiguous(), gate.contiguous(), up.contiguous(), kind)


def _pair_bwd_fake(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


_PAIR_FWD = register_op(
    "glu_pair_fwd", "(Tensor gate, Tensor up, str kind) -> Tensor", _pair_fwd, _pair_fwd_fake
)
_PAIR_BWD = register_op(
    "glu_pair_bwd",
    "(Tensor dy, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    _pair_bwd,
    _pair_bwd_fake,
)


class _GLUFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(packed: torch.Tensor, kind: str) -> torch.Tensor:
        y: torch.Tensor = _FWD(packed, kind)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        packed, ctx.kind = inputs
        ctx.save_for_backward(packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (packed,) = ctx.saved_tensors
        return _BWD(dy, packed, ctx.kind), None


class _GLUPairFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        y: torch.Tensor = _PAIR_FWD(gate, up, kind)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.kind = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dgate, dup = _PAIR_BWD(dy, *ctx.saved_tensors, ctx.kind)
        return dgate, dup, None


def gelu_kind(name: str, approximate: str) -> str:
    """Return the kernels' name for torch's ``approximate``. Raises ``ValueError`` naming the function."""
    if approximate not in GELU_KINDS:
        raise ValueError(f"{name}: approximate must be 'tanh' or 'none', got {approximate!r}")
    return GELU_KINDS[approximate]


def _glu(name: str, packed: torch.Tensor, up: torch.Tensor | None, kind: str) -> torch.Tensor:
    if up is not None:
        return _pair(name, packed, up, kind)
    if packed.ndim == 0 or packed.shape[-1] % 2:
        raise ValueError(
            f"{name}: packed must be [gate | up] with an even last dimension (..., 2F), "
            f"got {tuple(packed.shape)}"
        )
    if not packed.is_floating_point():
        raise TypeError(f"{name}: packed must be floating point, got {packed.dtype}")
    check_devices(name, packed)
    y: torch.Tensor = _GLUFunction.apply(packed, kind)
    return y


def _pair(name: str, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    if gate.ndim == 0 or up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"{name}: up must match gate (..., F), got {tuple(up.shape)} {up.dtype} "
            f"for {tuple(gate.shape)} {gate.dtype}"
        )
    if not gate.is_floating_point():
        raise TypeError(f"{name}: gate and up must be floating point, got {gate.dtype}")
    check_devices(name, gate, up=up)
    # One tensor passed twice: torch 2.11's compiled autograd.Function halves its gradient. Views differ.
    up = up.view_as(up) if up is gate else up
    y: torch.Tensor = _GLUPairFunction.apply(gate, up, kind)
    return y


def swiglu(packed: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``silu(gate) * up`` of packed (..., 2F) = [gate | up] -> (..., F), in packed's dtype.

    One packed tensor, as one linear layer makes it: splitting it first would cost copies. Leading
    dimensions may be strided as a slice of a wider projection is; other layouts are copied.
    The gradient is one packed tensor too. With ``up`` (..., F) the first argument is the gate alone, of
    up's shape and dtype, as two linear layers make them, and each has its gradient; nothing is copied.
    Arithmetic is fp32 whatever the storage dtype; nothing but the arguments is kept for the backward.
    Differentiable once.
    Raises ``ValueError`` for an odd last dimension and for an up that does not match the gate,
    ``TypeError`` for integers.
    """
    return _glu("swiglu", packed, up, "silu")


def geglu(
    packed: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "tanh"
) -> torch.Tensor:
    """Compute ``gelu(gate) * up`` of packed (..., 2F) = [gate | up] -> (..., F); see :func:`swiglu`.

    ``approximate`` names the GELU as ``torch.nn.functional.gelu`` does: ``"tanh"``, or ``"none"`` for erf.
    Raises ``ValueError`` for any other name.
    """
    return _glu("geglu", packed, up, gelu_kind("geglu", approximate))


class SwiGLU(torch.nn.Module):
    """:func:`swiglu` as a layer without parameters, after a linear layer of 2F outputs."""

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Map packed (..., 2F) -> (..., F)."""
        return swiglu(packed)


class GeGLU(torch.nn.Module):
    """:func:`geglu` as a layer without parameters, after a linear layer of 2F outputs."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        gelu_kind("GeGLU", approximate)
        self.approximate = approximate

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Map packed (..., 2F) -> (..., F)."""
        return geglu(packed, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
