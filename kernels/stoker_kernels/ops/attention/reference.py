"""Causal attention in PyTorch: the specification, and PyTorch's own CPU kernel behind the same contract.

Per head, in fp32 (fp64 for fp64 inputs), with S queries and keys:
    s = scale * q k^T, masked to column <= row;  lse = log(sum(exp(s)));  p = exp(s - lse);  o = p v
    dv = p^T do;  dp = do v^T;  delta = sum(do * o);  ds = p * (dp - delta)
    dq = scale * ds k;  dk = scale * ds^T q
(Dao 2023, "FlashAttention-2", section 2.) Outputs and gradients are (B, H, S, D) views of (B, S, H, D)
memory, so that a model's ``transpose(1, 2).reshape(B, S, H * D)`` copies nothing.
"""

from __future__ import annotations

import torch

from stoker_kernels._runtime import compute_dtype, dense_last_dim


def _sequence_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same (B, H, S, D) values over contiguous (B, S, H, D) memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (B, H, S, D) in the compute dtype -> p (B, H, S, S), lse (B, H, S)."""
    seq_len = q.shape[2]
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]), lse


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v (B, H, S, D) -> out (B, H, S, D) in q's dtype, lse (B, H, S) in the compute dtype."""
    dtype = compute_dtype(q.dtype)
    p, lse = _probabilities(q.to(dtype), k.to(dtype), scale)
    return _sequence_major((p @ v.to(dtype)).to(q.dtype)), lse


def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout, q, k, v, out (B, H, S, D), lse (B, H, S) -> dq, dk, dv (B, H, S, D)."""
    dtype = lse.dtype
    q_wide, k_wide, v_wide, dout_wide = (t.to(dtype) for t in (q, k, v, dout))
    p, _ = _probabilities(q_wide, k_wide, scale)
    delta = (dout_wide * out.to(dtype)).sum(-1, keepdim=True)
    ds = p * (dout_wide @ v_wide.transpose(-1, -2) - delta)
    dq = scale * (ds @ k_wide)
    dk = scale * (ds.transpose(-1, -2) @ q_wide)
    dv = p.transpose(-1, -2) @ dout_wide
    return (
        _sequence_major(dq.to(q.dtype)),
        _sequence_major(dk.to(k.dtype)),
        _sequence_major(dv.to(v.dtype)),
    )


def attention_fwd_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention_fwd`` by the blocked CPU kernel under ``F.scaled_dot_product_attention``.

    That kernel reads the last dimension as if its stride were 1; its public caller checks, so must we.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        dense_last_dim(q), dense_last_dim(k), dense_last_dim(v), 0.0, True, scale=scale
    )
    return _sequence_major(out), lse.contiguous()


def attention_bwd_cpu(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``attention_bwd`` by the same CPU kernel family."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(dense_last_dim(t) for t in (dout, q, k, v, out)), lse, 0.0, True, scale=scale
    )
    return _sequence_major(dq), _sequence_major(dk), _sequence_major(dv)
