"""Fused dense layers in PyTorch: the specification, and the CPU implementation.

Formulas, per row of K values, everything in fp32 (fp64 for fp64 inputs):
    z = W x + b,    y = f(z) + residual                         W (N, K), b (N,)
    [gate | up] = [W_gate x + b_gate | W_up x + b_up],  y = f(gate) * up + residual     W_* (F, K)
y is rounded once, to the residual's dtype, or x's without one; z = [gate | up], for the backward, to x's.
f is the identity ("none"), SiLU ("silu"), GELU by tanh ("gelu_tanh") or by erf ("gelu_erf").
    dz = dy * f'(z),  or  [dy * up * f'(gate) | dy * f(gate)]
    db = sum over rows of dz,  dW = dz^T x,  dx = dz W,  dresidual = dy
"""

from __future__ import annotations

import torch

from stoker_kernels.ops.glu.reference import activate, activate_backward, halves
from stoker_kernels.runtime.backend import compute_dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Map x (..., K), weight (N, K), bias (N,) -> (T, N) in the wide dtype; T is the number of rows."""
    wide = compute_dtype(x.dtype)
    z = x.to(wide).reshape(-1, x.shape[-1]) @ weight.to(wide).t()
    return z if bias is None else z.add_(bias.to(wide))


def _finished(y: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y.to(x.dtype) if residual is None else (y + residual).to(residual.dtype)


def fused_dense_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map x (..., K), weight (N, K), bias (N,), residual (..., N) -> y (..., N), z (T, N).

    z is empty unless it is to be saved.
    """
    z = linear(x, weight, bias)
    y = z if kind == "none" else activate(z, kind)
    return _finished(y, x, residual).contiguous(), z.to(x.dtype) if save else x.new_empty(0)


def fused_glu_dense_fwd(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map x (..., K), weights (F, K), biases (F,), residual (..., F) -> y (..., F), z (T, 2F)."""
    gate, up = linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
    y = _finished(activate(gate, kind) * up, x, residual).contiguous()
    return y, torch.cat([gate, up], -1).to(x.dtype) if save else x.new_empty(0)


def fused_dense_bwd(
    dy: torch.Tensor, z: torch.Tensor, kind: str, gated: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map dy (..., N), z (T, N) or (T, 2F) -> dz as z, db (N,) or (2F,) fp32, empty without a bias."""
    wide = compute_dtype(z.dtype)
    values = z.to(wide)
    if gated:
        gate, up = halves(values)
        dy = dy.to(wide).reshape(gate.shape)
        dz = torch.cat([activate_backward(dy * up, gate, kind), dy * activate(gate, kind)], -1)
    else:
        dz = activate_backward(dy.to(wide).reshape(z.shape), values, kind)
    return dz.to(z.dtype), dz.sum(0) if has_bias else values.new_empty(0)
