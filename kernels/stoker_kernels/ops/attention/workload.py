"""Attention as transformers call it: causal, full, grouped heads, packed sequences, dropout, windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.attention.autograd import flash_attention, flash_attention_varlen
from stoker_kernels.ops.attention.blocks import BlockMask
from stoker_kernels.ops.attention.relative import RelativeBias, distance_buckets
from stoker_kernels.workloads import Cost, Workload


def _tensors(
    device: torch.device | str, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Make tensors in the layout of a projection's output, (..., S, H, D)."""
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)


def _inputs(
    device: torch.device | str,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    rows = (batch, seq_len, kv_heads or heads)
    q, k, v = _tensors(
        device, dtype, (batch, seq_len, heads, head_dim), (*rows, head_dim),
        (*rows, v_dim or head_dim),
    )  # fmt: skip
    return {"q": q, "k": k, "v": v, **options}


def _dropout_inputs(device: torch.device | str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    seed = torch.randint(2**62, (1,), device=device)
    return _inputs(device, dtype, **shape, dropout_p=0.1, seed=seed)


def _alibi_inputs(device: torch.device | str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    """Add the slopes of Press et al. 2022, a power of two of heads: 2^(-8 h / H), h = 1 .. H."""
    heads = shape["heads"]
    slopes = 2.0 ** (torch.arange(1, heads + 1, device=device) * (-8.0 / heads))
    return _inputs(device, dtype, **shape, alibi_slopes=slopes)


def _relative_inputs(
    device: torch.device | str, dtype: torch.dtype, **shape: int
) -> dict[str, Any]:
    """Add T5's table of 32 buckets, in its decoder's form; T5 does not scale its scores."""
    table = torch.randn(32, shape["heads"], device=device, requires_grad=True)
    buckets = distance_buckets(32, bidirectional=False, device=device)
    bias = RelativeBias(table, bidirectional=False, buckets=buckets)
    return _inputs(device, dtype, **shape, relative_bias=bias, scale=1.0)


def _bias_inputs(device: torch.device | str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    """Add a bias that all sequences share, and that gets a gradient."""
    sizes = (1, shape["heads"], shape["seq_len"], shape["seq_len"])
    bias = torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)
    return _inputs(device, dtype, **shape, bias=bias)


def _block_inputs(
    device: torch.device | str, dtype: torch.dtype, block: int, **shape: int
) -> dict[str, Any]:
    """Add a mask of the diagonal blocks, the three before them, and the first (as BigBird's)."""
    length = shape["seq_len"]
    mask = BlockMask.from_function(
        lambda _, __, row, column: (column <= row) & ((row - column < 4) | (column == 0)),
        1, 1, length, length, (block, block), device,
    )  # fmt: skip
    return _inputs(device, dtype, **shape, block_mask=mask)


def _cost(
    causal: bool, batch: int, heads: int, kv_heads: int, length: int, dim: int, size: int
) -> Cost:
    flops = (2 if causal else 4) * batch * heads * length**2 * dim
    q_nbytes, kv_nbytes = (batch * count * length * dim * size for count in (heads, kv_heads))
    return Cost(
        forward_nbytes=2 * q_nbytes + 2 * kv_nbytes,
        backward_nbytes=4 * q_nbytes + 4 * kv_nbytes,  # q, out, dout, dq; k, v, dk, dv
        forward_flops=flops,
        backward_flops=2.5 * flops,
    )


def _dense_cost(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    kv_heads: int | None = None,
    causal: bool = True,
) -> Cost:
    return _cost(causal, batch, heads, kv_heads or heads, seq_len, head_dim, dtype.itemsize)


def _window_cost(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    kv_heads: int,
    window: int,
) -> Cost:
    """Count the columns that rows see: ``window`` of them, but fewer for the first rows."""
    whole = _dense_cost(dtype, batch, heads, seq_len, head_dim, kv_heads)
    seen = min(window, seq_len)
    share = (2 * seq_len - seen) * seen / seq_len**2  # of what the causal mask alone leaves
    return replace(
        whole, forward_flops=whole.forward_flops * share,
        backward_flops=whole.backward_flops * share,
    )  # fmt: skip


def _block_cost(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    kv_heads: int,
    block: int,
) -> Cost:
    """Count the listed blocks whole, also those on the diagonal."""
    whole = _dense_cost(dtype, batch, heads, seq_len, head_dim, kv_heads, causal=False)
    blocks = -(-seq_len // block)
    share = sum(min(row + 1, 5) for row in range(blocks)) / blocks**2
    return replace(
        whole, forward_flops=whole.forward_flops * share,
        backward_flops=whole.backward_flops * share,
    )  # fmt: skip


def _bias_cost(dtype: torch.dtype, batch: int, heads: int, seq_len: int, head_dim: int) -> Cost:
    """Add the bias, read in each pass, and its gradient."""
    plain = _dense_cost(dtype, batch, heads, seq_len, head_dim)
    nbytes = heads * seq_len**2 * dtype.itemsize
    return Cost(
        forward_nbytes=plain.forward_nbytes + nbytes,
        backward_nbytes=plain.backward_nbytes + 2 * nbytes,
        forward_flops=plain.forward_flops,
        backward_flops=plain.backward_flops,
    )


def _wide_cost(
    dtype: torch.dtype, batch: int, heads: int, seq_len: int, head_dim: int, v_dim: int
) -> Cost:
    """Count products and tensors of ``head_dim``, and those of ``v_dim``: 3 and 2 of 5 in the backward."""
    q, v = (
        _cost(True, batch, heads, heads, seq_len, dim, dtype.itemsize) for dim in (head_dim, v_dim)
    )
    return Cost(
        forward_nbytes=(q.forward_nbytes + v.forward_nbytes) / 2,
        backward_nbytes=(q.backward_nbytes + v.backward_nbytes) / 2,
        forward_flops=(q.forward_flops + v.forward_flops) / 2,
        backward_flops=(3 * q.backward_flops + 2 * v.backward_flops) / 5,
    )


def _varlen_inputs(
    device: torch.device | str,
    dtype: torch.dtype,
    sequences: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> dict[str, Any]:
    """Make ``sequences`` lengths that alternate between a quarter and seven quarters of ``seq_len``."""
    lengths = [seq_len // 4, seq_len * 2 - seq_len // 4] * (sequences // 2)
    total = sum(lengths)
    kv = (total, kv_heads, head_dim)
    q, k, v = _tensors(device, dtype, (total, heads, head_dim), kv, kv)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_seqlens = ends.to(device)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths),
    }  # fmt: skip


def _varlen_cost(
    dtype: torch.dtype, sequences: int, seq_len: int, heads: int, kv_heads: int, head_dim: int
) -> Cost:
    short, long = (
        _cost(True, sequences // 2, heads, kv_heads, length, head_dim, dtype.itemsize)
        for length in (seq_len // 4, seq_len * 2 - seq_len // 4)
    )
    return Cost(
        forward_nbytes=short.forward_nbytes + long.forward_nbytes,
        backward_nbytes=short.backward_nbytes + long.backward_nbytes,
        forward_flops=short.forward_flops + long.forward_flops,
        backward_flops=short.backward_flops + long.backward_flops,
    )


_SHAPE = {"batch": 4, "heads": 16, "seq_len": 4096, "head_dim": 128}
_SMALL = {"batch": 1, "heads": 2, "seq_len": 21, "head_dim": 32}
_HEAD_DIMS = ({"head_dim": 64}, {"head_dim": 32})
_full = partial(_run, causal=False)
_BF16 = (torch.bfloat16,)
WORKLOADS = (
    Workload("attention", _inputs, _run, _dense_cost, _SHAPE, _SMALL, _HEAD_DIMS[:1]),
    Workload(
        "attention_full", _inputs, _full, partial(_dense_cost, causal=False), _SHAPE, _SMALL,
        _HEAD_DIMS[:1], _BF16,
    ),
    Workload(
        "attention_gqa", _inputs, _run, _dense_cost, {**_SHAPE, "heads": 32, "kv_heads": 8},
        {**_SMALL, "heads": 4, "kv_heads": 2}, _HEAD_DIMS[:1], _BF16,
    ),
    Workload(
        "attention_varlen", _varlen_inputs, flash_attention_varlen, _varlen_cost,
        {"sequences": 16, "seq_len": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128},
        {"sequences": 2, "seq_len": 12, "heads": 2, "kv_heads": 1, "head_dim": 32},
        (*_HEAD_DIMS[:1], {"kv_heads": 32}), _BF16,
    ),
    Workload(
        "attention_dropout", _dropout_inputs, _run, _dense_cost, _SHAPE, _SMALL, _HEAD_DIMS, _BF16,
    ),
    # As Gemma 2 has it, with heads of 128; DeepSeek's latent attention; BLOOM.
    Workload(
        "attention_window", _inputs, partial(_run, softcap=50.0), _window_cost,
        {**_SHAPE, "heads": 32, "kv_heads": 16, "window": 1024},
        {**_SMALL, "heads": 2, "kv_heads": 1, "window": 9}, dtypes=_BF16,
    ),
    Workload(
        "attention_wide", _inputs, _run, _wide_cost, {**_SHAPE, "head_dim": 192, "v_dim": 128},
        {**_SMALL, "head_dim": 80, "v_dim": 32}, dtypes=_BF16,
    ),
    Workload("attention_alibi", _alibi_inputs, _run, _dense_cost, _SHAPE, _SMALL, dtypes=_BF16),
    # A T5 decoder; a bias as AlphaFold's pairs; BigBird without its random blocks.
    Workload(
        "attention_relative", _relative_inputs, _run, _dense_cost, {**_SHAPE, "head_dim": 64},
        _SMALL, dtypes=_BF16,
    ),
    Workload("attention_bias", _bias_inputs, _run, _bias_cost, _SHAPE, _SMALL, dtypes=_BF16),
    Workload(
        "attention_blocks", _block_inputs, _run, _block_cost,
        {**_SHAPE, "heads": 32, "kv_heads": 8, "block": 128},
        {**_SMALL, "kv_heads": 1, "block": 16}, dtypes=_BF16,
    ),
)  # fmt: skip
