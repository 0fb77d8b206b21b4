"""Peers of the model's ops: what one writes in plain PyTorch, and torch's own fused functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from stoker_kernels.ops.attention import BlockMask, RelativeBias

Functions = dict[str, Callable[..., Any]]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight), h


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def dropout_add_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, dropout_p: float
) -> tuple[Tensor, Tensor]:
    h = residual + F.dropout(x, dropout_p)
    return layer_norm(h, weight, bias), h


def masked_softmax(x: Tensor, scale: float, mask: Tensor) -> Tensor:
    return (x * scale).masked_fill(~mask, float("-inf")).softmax(-1)


def causal_softmax(x: Tensor, scale: float, causal: bool) -> Tensor:
    queries, keys = x.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
    return masked_softmax(x, scale, seen)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split, x (B, S, H, D); dimensions beyond the tables' are copied."""
    c, s = (torch.cat([t, t], -1)[:, None].to(x.dtype) for t in (cos, sin))
    turned, kept = x[..., : c.shape[-1]], x[..., c.shape[-1] :]
    a, b = turned.chunk(2, -1)
    turned = turned * c + torch.cat([-b, a], -1) * s
    return torch.cat([turned, kept], -1) if kept.numel() else turned


def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = (t[:, None].to(x.dtype) for t in (cos, sin))
    width = 2 * c.shape[-1]
    pairs, kept = x[..., :width].unflatten(-1, (-1, 2)), x[..., width:]
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return torch.cat([turned, kept], -1) if kept.numel() else turned


def rotary_packed(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    position = token - cu_seqlens[sequence]
    return rotary(x, cos[position], sin[position])


def swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_pair(packed: Tensor, up: Tensor) -> Tensor:
    return F.silu(packed) * up


def geglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def smoothed(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Add label smoothing 0.1 and z-loss 1e-4."""
    wide = logits.float()
    z = 1e-4 * wide.logsumexp(-1).square()
    loss = F.cross_entropy(wide, target, label_smoothing=0.1, reduction=reduction)
    return loss + (z if reduction == "none" else z.mean())


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(x @ weight.T, target)


def linear_cross_entropy_none(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return smoothed(x @ weight.T, target, "none")


def _with(backend: SDPBackend, function: Callable[..., Any], **inputs: Any) -> Any:
    with sdpa_kernel(backend):
        return function(**inputs)


def _backends(function: Callable[..., Any]) -> Functions:
    """Run ``function`` under each of scaled_dot_product_attention's kernels; ``eager`` lets torch choose."""
    return {
        "eager": function,
        **{
            f"sdpa_{name}": partial(_with, backend, function)
            for name, backend in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("efficient", SDPBackend.EFFICIENT_ATTENTION),
                ("math", SDPBackend.MATH),
            )
        },
    }


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, dropout_p: float = 0.0, seed: Any = None
) -> Tensor:
    """Map q, k, v (B, S, H, D) -> (B, H, S, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, dropout_p=dropout_p, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attend by the whole matrix of scores: torch's own takes no cap, and a bias only as such a matrix."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(q.shape[2], device=q.device)
    behind = row[:, None] - row
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * behind
    hidden = (behind < 0) | (behind >= window) if window else behind < 0
    p: Tensor = scores.masked_fill(hidden, float("-inf")).float().softmax(-1).to(v.dtype)
    return p @ v


def attention_added(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> Tensor:
    """Attend with a matrix that is added to the scores, in torch's own kernel for such."""
    length = q.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    mask = added.to(q.dtype).masked_fill(later, float("-inf"))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask.expand(q.shape[0], q.shape[1], -1, -1), scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def attention_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention_added(q, k, v, bias, None)


def attention_relative(
    q: Tensor, k: Tensor, v: Tensor, relative_bias: RelativeBias, scale: float
) -> Tensor:
    """Make T5's bias of all pairs, as transformers does."""
    row = torch.arange(q.shape[1], device=q.device)
    most = relative_bias.max_distance
    assert relative_bias.buckets is not None
    bucket = relative_bias.buckets[(row - row[:, None]).clamp(-most, most) + most]
    return attention_added(q, k, v, relative_bias.table[bucket].permute(2, 0, 1)[None], scale)


def attention_blocks(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """Attend under the mask of all pairs that the lists of blocks stand for."""
    rows, columns = block_mask.block_size
    counts, lists = block_mask.kv_num_blocks, block_mask.kv_indices
    listed = torch.arange(lists.shape[-1], device=q.device) < counts[..., None]
    blocks = torch.zeros_like(lists, dtype=torch.float32).scatter_add_(
        -1, lists.long(), listed.float()
    )
    length = q.shape[1]
    dense = blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    hidden = torch.zeros_like(dense).masked_fill(dense == 0, float("-inf"))
    return attention_added(q, k, v, hidden[..., :length, :length], None)


def prefix_sum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def radix_sort(x: Tensor) -> Tensor:
    return x.sort(dim=-1, stable=True).values


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Pad packed sequences to the longest, attend at once, and pack again."""
    lengths = cu_seqlens_q.diff()
    column = torch.arange(max_seqlen_q, device=q.device)
    real = column < lengths[:, None]  # (sequences, longest)
    padded = []
    for t in (q, k, v):
        wide = t.new_zeros(len(lengths), max_seqlen_q, *t.shape[1:])
        padded.append(wide.masked_scatter(real[..., None, None], t))
    return attention(*padded).transpose(1, 2)[real]


PEERS: dict[str, Functions] = {
    "rms_norm": {"eager": rms_norm},
    "add_rms_norm": {"eager": add_rms_norm},
    "layer_norm": {"eager": layer_norm},
    "dropout_add_layer_norm": {"eager": dropout_add_layer_norm},
    "masked_softmax": {"eager": masked_softmax},
    "causal_softmax": {"eager": causal_softmax},
    "rotary": {"eager": rotary},
    "rotary_interleaved": {"eager": rotary_interleaved},
    "rotary_packed": {"eager": rotary_packed},
    "swiglu": {"eager": swiglu},
    "swiglu_pair": {"eager": swiglu_pair},
    "geglu": {"eager": geglu},
    "bias_gelu": {"eager": partial(bias_gelu, approximate="tanh")},
    "bias_gelu_erf": {"eager": partial(bias_gelu, approximate="none")},
    "cross_entropy": {"eager": cross_entropy},
    "cross_entropy_smoothed": {"eager": smoothed},
    "attention_window": {"eager": partial(attention_scored, softcap=50.0)},
    "attention_alibi": {"eager": attention_scored},
    "attention_bias": {"eager": attention_bias},
    "attention_relative": {"eager": attention_relative},
    "attention_blocks": {"eager": attention_blocks},
    "prefix_sum": {"eager": prefix_sum},
    "radix_sort": {"eager": radix_sort},
    "linear_cross_entropy": {"eager": linear_cross_entropy},
    "linear_cross_entropy_none": {"eager": linear_cross_entropy_none},
}
for _name, _causal in (("attention", True), ("attention_full", False)):
    PEERS[_name] = _backends(partial(attention, causal=_causal))
for _name in ("attention_gqa", "attention_dropout"):
    PEERS[_name] = _backends(attention)
PEERS["attention_varlen"] = _backends(attention_varlen)
PEERS["attention_wide"] = {  # torch's flash attention takes only values as wide as keys
    name: function for name, function in _backends(attention).items() if name != "sdpa_flash"
}


if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later

    def torch_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Run torch's own, which has no full logits either."""
        return F.linear_cross_entropy(x, weight, target)

    PEERS["linear_cross_entropy"]["torch_fused"] = torch_linear_cross_entropy
