"""The attention blocks: projections, positions, flash attention, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.packing import Packing
from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.attention import flash_attention, flash_attention_varlen

if TYPE_CHECKING:
    from stoker_kernels.nn.alibi import ALiBi
    from stoker_kernels.nn.relative import RelativeBias
    from stoker_kernels.nn.rotary import Rotary
    from stoker_kernels.ops.attention import relative


class _Scores(TypedDict, total=False):
    """The keywords of our op that shape the scores."""

    scale: float
    dropout_p: float
    seed: torch.Tensor | None
    causal: bool
    alibi_slopes: torch.Tensor
    relative_bias: relative.RelativeBias


class _Heads(nn.Module):
    """The part that all attention shares: the scores of projected heads, on our kernel or PyTorch's."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        dropout: float,
        scale: float | None,
        ops: Impl,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if heads % kv_heads:
            raise ValueError(f"{name}: heads {heads} is not a multiple of kv_heads {kv_heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.dropout = causal, dropout
        self.scale = head_dim**-0.5 if scale is None else scale
        self.alibi: ALiBi | None = None
        self.relative: RelativeBias | None = None
        self.ours = checked(ops, f"{name}: ops") == "stoker"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Packing | None = None,
        columns: Packing | None = None,
        seed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map q (B, S, H, D), k, v (B, S_k, G, D) -> (B, S, H, D); packed, B is 1 and both are given.

        ``seed`` (1,) int64 is of the dropout in our kernel, drawn where it is None.
        """
        if rows is not None and q.shape[0] != 1:
            raise ValueError(
                f"{type(self).__name__}: packed tokens must be one row (1, T), got {q.shape[0]} rows"
            )
        if self.ours:
            return self._ours(q, k, v, rows, columns, seed)
        return self._torch(q, k, v, rows, columns)

    def _ours(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Packing | None,
        columns: Packing | None,
        seed: torch.Tensor | None,
    ) -> torch.Tensor:
        scores: _Scores = {
            "seed": seed,
            "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0,
            "causal": self.causal,
        }
        if self.alibi is not None:
            scores["alibi_slopes"] = self.alibi.slopes
        if self.relative is not None:
            scores["relative_bias"] = self.relative.given
        if rows is None or columns is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, S, D)
            return flash_attention(q, k, v, **scores).transpose(1, 2)
        edges = columns.cu_seqlens
        edges = edges.view_as(edges)  # torch.compile refuses one tensor passed twice
        y = flash_attention_varlen(
            q[0], k[0], v[0], rows.cu_seqlens, edges, rows.max_seqlen, columns.max_seqlen, **scores
        )  # (T, H, D)
        return y[None]

    def _torch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Packing | None,
        columns: Packing | None,
    ) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        s, s_k = q.shape[1], k.shape[1]
        mask = None  # bool, true where a row may look, or what is added to the scores
        if rows is not None and columns is not None:
            mask = rows.sees(columns, self.causal)  # (S, S_k)
        distance = None
        shaped = self.alibi if self.relative is None else self.relative
        # PyTorch's is_causal aligns the first row with the first column.
        if mask is None and (shaped is not None or (self.causal and s != s_k)):
            row = torch.arange(s_k - s, s_k, device=q.device)[:, None]
            distance = torch.arange(s_k, device=q.device) - row  # (S, S_k)
            mask = distance <= 0 if self.causal else None
        elif shaped is not None and rows is not None and columns is not None:
            distance = rows.distance(columns)
        if shaped is not None:
            bias = shaped(distance)  # (H, S, S_k)
            bias = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
            mask = bias.to(q.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, S, D)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, p, is_causal=self.causal and mask is None, scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return y.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, ours={self.ours}"
        )


class Attention(_Heads):
    """Self-attention of ``heads`` query heads that share ``kv_heads`` key and value heads (GQA, MQA).

    One packed projection makes q, k and v. ``head_dim`` is ``dim / heads`` by default, ``scale`` of the
    scores 1/sqrt(head_dim). ``rotary``, ``alibi`` and ``relative`` are shared by all layers of a model, one
    of them at most. ``dropout`` drops attention probabilities in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi: ALiBi | None = None,
        relative: RelativeBias | None = None,
        ops: Impl = "stoker",
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        if head_dim is None and dim % heads:
            raise ValueError(f"Attention: dim {dim} is not a multiple of heads {heads}")
        if sum(kind is not None for kind in (rotary, alibi, relative)) > 1:
            raise ValueError("Attention: give one of rotary, alibi and relative at most")
        head_dim = dim // heads if head_dim is None else head_dim
        super().__init__(
            heads, kv_heads, head_dim, causal=causal, dropout=dropout, scale=scale, ops=ops
        )
        self.rotary, self.alibi, self.relative = rotary, alibi, relative
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)
        # Makes keys and values (P, G, D) that all tokens see: ``models.prefix`` puts one here.
        self.prefix: nn.Module | None = None

    def forward(
        self,
        x: torch.Tensor,
        packing: Packing | None = None,
        seed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map x (B, S, C) -> (B, S, C); with ``packing`` B is 1 and S holds several sequences."""
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, -1, self.head_dim)  # (B, S, H + 2 G, D)
        # (B, S, H, D), twice (B, S, G, D); each split is a copy of the gradients, so one where one does.
        if self.rotary is None:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
        else:
            qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
            qk = self.rotary(qk, None if packing is None else packing.positions)
            q, k = qk.split([self.heads, self.kv_heads], 2)
        columns = packing
        if self.prefix is not None:
            k, v, columns = self._prefixed(k, v, packing)
        y = self.attend(q, k, v, packing, columns, seed)  # (B, S, H, D)
        return self.out(y.reshape(b, s, -1))

    def _prefixed(
        self, k: torch.Tensor, v: torch.Tensor, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor, Packing | None]:
        """Put the prefix before the keys and values of each sequence."""
        assert self.prefix is not None
        before = [t.to(k.dtype) for t in self.prefix()]  # (P, G, D) each
        if packing is None:
            many = [t.expand(k.shape[0], *t.shape) for t in before]
            return torch.cat([many[0], k], 1), torch.cat([many[1], v], 1), None
        columns = packing.with_prefix(len(before[0]))
        own = columns.positions < len(before[0])  # (T_k,): of a prefix
        token = torch.arange(len(own), device=k.device) - len(before[0]) * (columns.segments + 1)
        token = token.clamp(min=0)
        k, v = (
            torch.where(
                own[:, None, None], mine[columns.positions.clamp(max=len(mine) - 1)], t[0, token]
            )
            for mine, t in zip(before, (k, v), strict=True)
        )
        return k[None], v[None], columns


class CrossAttention(_Heads):
    """Attention of a decoder's tokens to an encoder's outputs; arguments as :class:`Attention`'s."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        ops: Impl = "stoker",
    ) -> None:
        head_dim = dim // heads if head_dim is None else head_dim
        super().__init__(
            heads, heads, head_dim, causal=False, dropout=dropout, scale=scale, ops=ops
        )
        self.q = nn.Linear(dim, heads * head_dim, bias=bias)
        self.kv = nn.Linear(dim, 2 * heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        lengths: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map x (B, S, C), context (B, S_k, C) -> (B, S, C); ``lengths`` (B,) of each context are real."""
        b, s, _ = x.shape
        s_k = context.shape[1]
        q = self.q(x).view(b, s, self.heads, self.head_dim)
        k, v = self.kv(context).view(b, s_k, 2 * self.heads, self.head_dim).chunk(2, 2)
        rows = columns = None
        if lengths is not None:
            rows = Packing.padded(torch.full_like(lengths, s), s)
            columns = Packing.padded(lengths, s_k)
            q, k, v = (t.reshape(1, -1, self.heads, self.head_dim) for t in (q, k, v))
        y = self.attend(q, k, v, rows, columns, seed)
        return self.out(y.reshape(b, s, -1))
