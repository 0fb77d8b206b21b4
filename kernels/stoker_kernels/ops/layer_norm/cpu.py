"""LayerNorm on the CPU: the reference's stream, PyTorch's fused CPU norm on it."""

from __future__ import annotations

import torch

from stoker_kernels._runtime import compute_dtype
from stoker_kernels.ops.layer_norm.reference import layer_norm_input, through_dropout


def layer_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``reference.layer_norm_fwd``."""
    h = layer_norm_input(x, residual, seed, dropout_p)
    dtype = compute_dtype(x.dtype)
    y, mean, rstd = torch.native_layer_norm(
        h.to(dtype), weight.shape, weight.to(dtype), None if bias is None else bias.to(dtype), eps
    )
    h = x.new_empty(0) if h is x else h
    return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    dropout_p: float,
    has_residual: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``reference.layer_norm_bwd``."""
    dtype = rstd.dtype
    wide, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy.to(dtype).contiguous(), h.to(dtype), weight.shape, mean.unsqueeze(-1), rstd.unsqueeze(-1),
        weight.to(dtype), weight.to(dtype) if has_bias else None, [True, True, has_bias],
    )  # fmt: skip
    db = db.to(weight.dtype) if has_bias else weight.new_empty(0)
    if dh is not None:
        wide += dh
    return (*through_dropout(wide, h, seed, dropout_p, has_residual), dw.to(weight.dtype), db)
