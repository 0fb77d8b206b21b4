"""LayerNorm on the CPU: the reference's stream, PyTorch's fused CPU norm on it."""

from __future__ import annotations

import torch

from stoker_kernels.ops.layer_norm.reference import (
    Four,
    Options,
    layer_norm_input,
    through_dropout,
)
from stoker_kernels.runtime.backend import compute_dtype


def layer_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    options: Options,
) -> Four:
    """Return y, h, mean, rstd, as ``reference.layer_norm_fwd``."""
    h = layer_norm_input(x, residual, options)
    dtype = compute_dtype(x.dtype)
    y, mean, rstd = torch.native_layer_norm(
        h.to(dtype), h.shape[-1:], options.scale(weight, dtype),
        None if bias is None else bias.to(dtype), eps,
    )  # fmt: skip
    h = x.new_empty(0) if h is x else h
    return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    options: Options,
) -> Four:
    """Return dx, dresidual, dw, db, as ``reference.layer_norm_bwd``."""
    dtype = rstd.dtype
    scale = options.scale(weight, dtype)
    wide, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy.to(dtype).contiguous(), h.to(dtype), h.shape[-1:], mean.unsqueeze(-1), rstd.unsqueeze(-1),
        scale, scale if options.has_bias else None, [True, weight is not None, options.has_bias],
    )  # fmt: skip
    dw = h.new_empty(0) if weight is None else dw.to(weight.dtype)
    db = db.to(dw.dtype) if options.has_bias else dw.new_empty(0)
    if dh is not None:
        wide += dh
    return (*through_dropout(wide, h, options), dw, db)
