"""Attention on the CPU: the blocked kernel under ``F.scaled_dot_product_attention``, for the cases it has.

That kernel reads the last dimension as if its stride were 1; its public caller checks, so must we. It has no
grouped heads: keys and values are repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stoker_kernels.ops.attention.reference import grouped, sequence_major
from stoker_kernels.runtime.backend import dense_last_dim

if TYPE_CHECKING:
    from stoker_kernels.ops.attention.reference import Options


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Return whether the kernel computes this case; it aligns the causal diagonal top-left."""
    return (
        q.ndim == 4
        and q.numel() > 0
        and k.numel() > 0
        and (k.shape[2] == q.shape[2] or not options.causal)
        and options.seed is None
        and not options.scored
        and q.shape[-1] == v.shape[-1]
    )


def _repeated(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Map (B, Hkv, S, D) -> (B, Hkv * group, S, D), each head ``group`` times."""
    return dense_last_dim(tensor if group == 1 else tensor.repeat_interleave(group, 1))


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and lse, as ``reference.attention_fwd``."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        dense_last_dim(q), *(_repeated(t, group) for t in (k, v)), 0.0, options.causal,
        scale=options.scale,
    )  # fmt: skip
    return sequence_major(out), lse.contiguous()


def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients dq, dk, dv, as ``reference.attention_bwd`` without dlse."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dense_last_dim(dout), dense_last_dim(q), _repeated(k, group), _repeated(v, group),
        dense_last_dim(out), lse, 0.0, options.causal, scale=options.scale,
    )  # fmt: skip
    if group > 1:
        dk, dv = (grouped(t, group).sum(2, dtype=lse.dtype).to(k.dtype) for t in (dk, dv))
    return sequence_major(dq), sequence_major(dk), sequence_major(dv)
