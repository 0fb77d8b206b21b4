"""Launches the attention kernels: tile sizes, strides, output buffers.

Limit: compute. FLOPs, causal: forward 2*B*H*S^2*D, backward 2.5 times that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from stoker_kernels._launch import device_of, is_interpreted, launch
from stoker_kernels._runtime import dense_last_dim
from stoker_kernels.ops.attention.kernels import (
    attention_bwd_dkv_kernel,
    attention_bwd_dq_kernel,
    attention_fwd_kernel,
)

LOG2_E = 1.4426950408889634
INTERPRETER = 0


class Tile(NamedTuple):
    """Launch configuration of one kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Launch configurations of the three kernels."""

    fwd: Tile
    dq: Tile
    dkv: Tile


def tiles(head_dim: int, element_nbytes: int, arch: int) -> Tiles:
    """Tile sizes by head dimension, storage width and architecture (90: sm_90; 0: the interpreter).

    Chosen so that no kernel spills a register, which the code generation tests assert; fp32 products run
    on the CUDA cores and need small tiles for that. The interpreter's tiles are unequal on purpose.
    """
    if arch == INTERPRETER:
        return Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
    if element_nbytes == 4 and head_dim == 128:
        return Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))
    if element_nbytes == 4:
        return Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))
    if head_dim == 32:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if head_dim == 64:
        return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if arch >= 90:
        return Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 1), Tile(32, 128, 8, 2))
    return Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2))


def _arch(q: torch.Tensor) -> int:
    device = device_of(attention_fwd_kernel, q)
    return INTERPRETER if device.interpreted else device.arch


def _new_like(q: torch.Tensor) -> torch.Tensor:
    """An empty (B, H, S, D) view of (B, S, H, D) memory."""
    batch, heads, seq_len, head_dim = q.shape
    return q.new_empty((batch, seq_len, heads, head_dim)).transpose(1, 2)


def _upcast(q: torch.Tensor) -> bool:
    return q.dtype == torch.float32 or is_interpreted(attention_fwd_kernel)


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.attention_fwd``."""
    batch, heads, seq_len, head_dim = q.shape
    q, k, v = dense_last_dim(q), dense_last_dim(k), dense_last_dim(v)
    out = _new_like(q)
    lse = q.new_empty((batch, heads, seq_len), dtype=torch.float32)
    if not out.numel():
        return out, lse
    tile = tiles(head_dim, q.element_size(), _arch(q)).fwd
    launch(
        attention_fwd_kernel, (triton.cdiv(seq_len, tile.block_m) * batch * heads,),
        q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        heads, seq_len, scale * LOG2_E,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HEAD_DIM=head_dim, UPCAST=_upcast(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages, on=q,
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``reference.attention_bwd``."""
    batch, heads, seq_len, head_dim = q.shape
    dout, q, k, v = (dense_last_dim(t) for t in (dout, q, k, v))
    dq, dk, dv = _new_like(q), _new_like(q), _new_like(q)
    if not dq.numel():
        return dq, dk, dv
    if out.stride() != dq.stride():
        out = dq.new_empty((batch, seq_len, heads, head_dim)).transpose(1, 2).copy_(out)
    delta = torch.empty_like(lse)
    strides = (
        *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dq.stride()[:3]
    )  # fmt: skip
    config = tiles(head_dim, q.element_size(), _arch(q))
    tile = config.dq
    launch(
        attention_bwd_dq_kernel, (triton.cdiv(seq_len, tile.block_m) * batch * heads,),
        dout, q, k, v, out, lse, delta, dq, *strides, heads, seq_len, scale,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HEAD_DIM=head_dim, UPCAST=_upcast(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages, on=q,
    )  # fmt: skip
    tile = config.dkv
    launch(
        attention_bwd_dkv_kernel, (triton.cdiv(seq_len, tile.block_n) * batch * heads,),
        dout, q, k, v, lse, delta, dk, dv, *strides, heads, seq_len, scale,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HEAD_DIM=head_dim, UPCAST=_upcast(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages, on=q,
    )  # fmt: skip
    return dq, dk, dv
