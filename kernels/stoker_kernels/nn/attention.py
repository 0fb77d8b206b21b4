"""The attention block: one packed projection, rotary positions, flash attention, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.attention import flash_attention, flash_attention_varlen

if TYPE_CHECKING:
    from stoker_kernels.nn.packing import Packing
    from stoker_kernels.nn.rotary import Rotary


class Attention(nn.Module):
    """Self-attention of ``heads`` query heads that share ``kv_heads`` key and value heads (GQA, MQA).

    ``rotary`` is shared by all layers of a model. ``dropout`` drops attention probabilities in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
        ops: Impl = "stoker",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if dim % heads:
            raise ValueError(f"Attention: dim {dim} is not a multiple of heads {heads}")
        if heads % kv_heads:
            raise ValueError(f"Attention: heads {heads} is not a multiple of kv_heads {kv_heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.causal, self.dropout, self.rotary = causal, dropout, rotary
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.ours = checked(ops, "Attention: ops") == "stoker"

    def forward(self, x: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        """Map x (B, S, C) -> (B, S, C); with ``packing`` B is 1 and S holds several sequences."""
        b, s, c = x.shape
        qkv = self.qkv(x).view(b, s, -1, self.head_dim)  # (B, S, H + 2 G, D)
        # (B, S, H, D), twice (B, S, G, D); each split is a copy of the gradients, so one where one does.
        if self.rotary is None:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
        else:
            qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
            qk = self.rotary(qk, None if packing is None else packing.positions)
            q, k = qk.split([self.heads, self.kv_heads], 2)
        if packing is not None and b != 1:
            raise ValueError(f"Attention: packed tokens must be one row (1, T), got {b} rows")
        attend = self._ours if self.ours else self._torch
        y = attend(q, k, v, packing)  # (B, S, H, D)
        return self.out(y.reshape(b, s, c))

    def _ours(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing | None
    ) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        if packing is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, S, D)
            return flash_attention(q, k, v, causal=self.causal, dropout_p=p).transpose(1, 2)
        edges, longest = packing.cu_seqlens, packing.max_seqlen
        same = edges.view_as(edges)  # torch.compile refuses one tensor passed twice
        y = flash_attention_varlen(
            q[0], k[0], v[0], edges, same, longest, longest, causal=self.causal, dropout_p=p
        )  # (T, H, D)
        return y[None]

    def _torch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing | None
    ) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        mask = None if packing is None else packing.mask(self.causal)  # (S, S)
        causal = self.causal and mask is None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, S, D)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=causal, enable_gqa=grouped)
        return y.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, ours={self.ours}"
        )
