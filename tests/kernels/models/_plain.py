"""Falcon and T5 written a second time, in plain torch over a dictionary of weights, from the papers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from stoker_kernels.models.config import TransformerConfig
    from stoker_kernels.models.t5 import T5Config

Weights = dict[str, torch.Tensor]


def _softmaxed(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores (B, H, S, S_k), v (B, H, S_k, D) -> (B, S, H * D)."""
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """(B, S, count * D) -> (B, count, S, D)."""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def _turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions of (B, H, S, D), as complex numbers."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rate
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def falcon_loss(
    w: Weights, c: TransformerConfig, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (c.dim,), w[f"{name}.weight"], w[f"{name}.bias"], c.eps)

    def attended(x: torch.Tensor, name: str) -> torch.Tensor:
        qkv = F.linear(x, w[f"{name}.qkv.weight"], w.get(f"{name}.qkv.bias"))
        groups, d = c.kv_heads or c.heads, c.dim // c.heads
        q, k, v = qkv.split([c.heads * d, groups * d, groups * d], -1)
        q, k, v = _heads(q, c.heads), _heads(k, groups), _heads(v, groups)
        if c.position == "rotary":
            q, k = _turned(q, c.rotary_base), _turned(k, c.rotary_base)
        k, v = (t.repeat_interleave(c.heads // groups, 1) for t in (k, v))
        scores = q @ k.mT
        if (
            c.position == "alibi"
        ):  # a column's own position: the same as its distance, after softmax
            slope = 2.0 ** (-8 * torch.arange(1, c.heads + 1, dtype=x.dtype) / c.heads)
            scores = scores + slope[:, None, None] * torch.arange(x.shape[1])
        scores = scores / math.sqrt(d)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = _softmaxed(scores.masked_fill(hidden, -torch.inf), v)
        return F.linear(y, w[f"{name}.out.weight"], w.get(f"{name}.out.bias"))

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        wide = F.gelu(F.linear(x, w[f"{name}.up.weight"], w.get(f"{name}.up_bias")))
        return F.linear(wide, w[f"{name}.down.weight"], w.get(f"{name}.down.bias"))

    h = w["embed.weight"][tokens]
    for i in range(c.layers):
        at = f"layers.{i}"
        y = normed(h, f"{at}.norm_attention")
        update = attended(y, f"{at}.attention")
        if c.parallel_norms == 0:
            h = h + update
            h = h + mlp(normed(h, f"{at}.norm_mlp"), f"{at}.mlp")
        else:
            y = y if c.parallel_norms == 1 else normed(h, f"{at}.norm_mlp")
            h = h + update + mlp(y, f"{at}.mlp")
    logits = normed(h, "norm") @ w["embed.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _bucket(distance: int, buckets: int, longest: int, both: bool) -> int:
    """The bucket of one distance, column - row, with Python's numbers."""
    start = 0
    if both:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    if distance < buckets // 2:
        return start + distance
    far = math.log(distance / (buckets // 2)) / math.log(longest / (buckets // 2))
    return start + min(buckets // 2 + int(far * (buckets - buckets // 2)), buckets - 1)


def t5_loss(
    w: Weights, c: T5Config, tokens: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    inner = c.heads * c.head_dim

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c.eps).rsqrt() * w[f"{name}.weight"]

    def attended(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, out: str
    ) -> torch.Tensor:
        q, k, v = (_heads(t, c.heads) for t in (q, k, v))
        return _softmaxed(q @ k.mT + bias, v) @ w[out].T

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x @ w[f"{name}.up.weight"].T
        if c.mlp == "geglu":
            wide = F.gelu(wide[..., : c.hidden], approximate="tanh") * wide[..., c.hidden :]
        else:
            wide = wide.clamp(min=0)
        return wide @ w[f"{name}.down.weight"].T

    def positions(stack: str, s: int) -> torch.Tensor:
        both = stack == "encoder"
        chosen = [
            [_bucket(j - i, c.buckets, c.max_distance, both) for j in range(s)] for i in range(s)
        ]
        return w[f"{stack}.relative.weight"][torch.tensor(chosen)].permute(2, 0, 1)

    def stack(name: str, x: torch.Tensor, hidden: torch.Tensor, context: torch.Tensor | None):
        bias = positions(name, x.shape[1]).masked_fill(hidden, -torch.inf)
        for i in range(c.depth if context is not None else c.layers):
            at = f"{name}.layers.{i}"
            qkv = normed(x, f"{at}.norm_attention") @ w[f"{at}.attention.qkv.weight"].T
            x = x + attended(*qkv.chunk(3, -1), bias, f"{at}.attention.out.weight")
            if context is not None:
                q = normed(x, f"{at}.norm_cross") @ w[f"{at}.cross.q.weight"].T
                k, v = (context @ w[f"{at}.cross.kv.weight"].T).split(inner, -1)
                x = x + attended(q, k, v, cross_bias, f"{at}.cross.out.weight")
            x = x + mlp(normed(x, f"{at}.norm_mlp"), f"{at}.mlp")
        return normed(x, f"{name}.norm")

    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]  # (B, S)
    cross_bias = torch.zeros(padding.shape).masked_fill(padding, -torch.inf)[:, None, None]
    cross_bias = cross_bias.to(w["embed.weight"].dtype)
    context = stack("encoder", w["embed.weight"][tokens], padding[:, None, None], None)
    read = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1).clamp(min=0)
    ahead = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).triu(1)
    x = stack("decoder", w["embed.weight"][read], ahead, context)
    x = x / math.sqrt(c.dim) if c.tied else x
    logits = x @ w["embed.weight" if c.tied else "head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
