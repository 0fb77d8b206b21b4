"""Gated linear units in PyTorch: the specification, and the CPU implementation.

Formulas (Shazeer 2020, arXiv 2002.05202), per row of F values, everything in fp32 (fp64 for fp64
inputs), rounded once to the inputs' dtype:
    y     = f(gate) * up
    dgate = dy * up * f'(gate),  dup = dy * f(gate)
f is SiLU ("silu"), or GELU by tanh ("gelu_tanh") or by erf ("gelu_erf"). gate and up are two tensors, or
the halves of one row ``packed = [gate | up]`` of 2F values, whose gradient is [dgate | dup].
Nothing but gate and up is kept for the backward; the activation is computed again.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from stoker_kernels.runtime.backend import compute_dtype

_aten = torch.ops.aten


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(x), elementwise."""
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activate_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute dy * f'(x), elementwise."""
    if kind == "silu":
        return _aten.silu_backward(dy, x)
    return _aten.gelu_backward(dy, x, approximate="tanh" if kind == "gelu_tanh" else "none")


def halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split packed (..., 2F) -> gate, up (..., F), views of it."""
    columns = packed.shape[-1] // 2
    return packed[..., :columns], packed[..., columns:]


def glu_fwd(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Map packed (..., 2F) -> y (..., F) in its dtype."""
    gate, up = halves(packed)
    return glu_pair_fwd(gate, up, kind)


def glu_bwd(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Map dy (..., F), packed (..., 2F) -> dpacked (..., 2F) in packed's dtype."""
    gate, up = halves(packed)
    return torch.cat(glu_pair_bwd(dy, gate, up, kind), -1)


def glu_pair_fwd(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Map gate, up (..., F) -> y (..., F) in their dtype."""
    wide = compute_dtype(gate.dtype)
    return (activate(gate.to(wide), kind) * up.to(wide)).to(gate.dtype)


def glu_pair_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map dy, gate, up (..., F) -> dgate, dup (..., F) in gate's dtype."""
    wide = compute_dtype(gate.dtype)
    gates, dy = gate.to(wide), dy.to(wide)
    dgate = activate_backward(dy * up.to(wide), gates, kind)
    return dgate.to(gate.dtype), (dy * activate(gates, kind)).to(gate.dtype)
