"""Gated linear units in PyTorch: the specification, and the CPU implementation.

Formulas (Shazeer 2020, arXiv 2002.05202), per row ``packed = [gate | up]`` of 2F values, everything in
fp32 (fp64 for fp64 inputs), rounded once to packed's dtype:
    y     = f(gate) * up
    dgate = dy * up * f'(gate),  dup = dy * f(gate),  written as one row [dgate | dup]
f is SiLU ("silu"), or GELU by tanh ("gelu_tanh") or by erf ("gelu_erf").
Nothing but ``packed`` is kept for the backward; the activation is computed again.
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


def glu_fwd(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Map packed (..., 2F) -> y (..., F) in its dtype."""
    gate, up = packed.to(compute_dtype(packed.dtype)).chunk(2, -1)
    return (activate(gate, kind) * up).to(packed.dtype)


def glu_bwd(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Map dy (..., F), packed (..., 2F) -> dpacked (..., 2F) in packed's dtype."""
    wide = compute_dtype(packed.dtype)
    gate, up = packed.to(wide).chunk(2, -1)
    dy = dy.to(wide)
    dgate = activate_backward(dy * up, gate, kind)
    return torch.cat([dgate, dy * activate(gate, kind)], -1).to(packed.dtype)
