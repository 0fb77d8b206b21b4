"""Bias + GELU's torch side: opaque ops with fakes, the autograd Function, the function and the module."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.bias_gelu import reference
from stoker_kernels.runtime.backend import Backend, backend_for, check_devices, register_op

_KINDS = {name: kind for kind, name in reference.APPROXIMATE.items()}


def _fwd(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.bias_gelu import triton

        return triton.bias_gelu_fwd(x, bias, kind)
    return reference.bias_gelu_fwd(x.contiguous(), bias, kind)


def _fwd_fake(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.bias_gelu import triton

        return triton.bias_gelu_bwd(dy, x, bias, kind)
    return reference.bias_gelu_bwd(dy, x.contiguous(), bias, kind)


def _bwd_fake(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


_FWD = register_op("bias_gelu_fwd", "(Tensor x, Tensor bias, str kind) -> Tensor", _fwd, _fwd_fake)
_BWD = register_op(
    "bias_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor bias, str kind) -> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _BiasGELUFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
        y: torch.Tensor = _FWD(x, bias, kind)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, bias, ctx.kind = inputs
        ctx.save_for_backward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, bias = ctx.saved_tensors
        dx, dbias = _BWD(dy, x, bias, ctx.kind)
        return dx, dbias, None


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """Compute ``gelu(x + bias)`` of x (..., N) and bias (N,), in x's dtype.

    For a linear layer without bias: the sum is never written to memory, and the backward computes
    dx and dbias in one pass. ``approximate`` names the GELU as ``torch.nn.functional.gelu`` does:
    ``"tanh"``, or ``"none"`` for erf. Arithmetic is fp32 whatever the storage dtype, so x + bias is not
    rounded in between. Differentiable once.
    Raises ``ValueError`` for a bias of another shape or device or an unknown approximation, ``TypeError``
    for integers.
    """
    if approximate not in _KINDS:
        raise ValueError(f"bias_gelu: approximate must be 'tanh' or 'none', got {approximate!r}")
    if x.ndim == 0 or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias_gelu: bias must have shape (N,) for x (..., N), "
            f"got {tuple(bias.shape)} for {tuple(x.shape)}"
        )
    if not (x.is_floating_point() and bias.is_floating_point()):
        raise TypeError(
            f"bias_gelu: x and bias must be floating point, got {x.dtype}, {bias.dtype}"
        )
    check_devices("bias_gelu", x, bias=bias)
    # One tensor passed twice: torch 2.11's compiled autograd.Function halves its gradient. Views differ.
    bias = bias.view_as(bias) if bias is x else bias
    y: torch.Tensor = _BiasGELUFunction.apply(x, bias, _KINDS[approximate])
    return y


class BiasGELU(torch.nn.Module):
    """:func:`bias_gelu` with a learned bias (dim,), zeros at the start, after a linear layer without one."""

    def __init__(self, dim: int, approximate: str = "tanh") -> None:
        super().__init__()
        if approximate not in _KINDS:
            raise ValueError(f"BiasGELU: approximate must be 'tanh' or 'none', got {approximate!r}")
        self.bias = torch.nn.Parameter(torch.zeros(dim))
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., dim) -> (..., dim)."""
        return bias_gelu(x, self.bias, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"{self.bias.numel()}, approximate={self.approximate!r}"
