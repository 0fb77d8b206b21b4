"""The launchers of Hopper's attention kernels: descriptors for the TMA, buffers, tile sizes.

Called by ``autograd`` where ``hopper.chosen`` says so. Limit: compute, as of the kernels in ``..triton``;
the backward pass has five products instead of seven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stoker_kernels.ops.attention.hopper import addressable
from stoker_kernels.ops.attention.hopper.backward import hopper_bwd_kernel
from stoker_kernels.ops.attention.hopper.forward import hopper_fwd_kernel
from stoker_kernels.ops.attention.hopper.statistics import hopper_statistics_kernel
from stoker_kernels.ops.attention.reference import new_like
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch

if TYPE_CHECKING:
    from stoker_kernels.ops.attention.reference import Options

LOG2_E = 1.4426950408889634
FORWARD_ROWS, BACKWARD_ROWS, KEYS = 128, 64, 128  # of a tile
STAGES = 2


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe (B, H, S, D) in tiles of ``rows`` rows; what lies behind the last is zero, or not stored."""
    layout = gl.NVMMASharedLayout(128, tensor.element_size() * 8, rank=4)
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, tensor.shape[3]], layout)


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.attention_fwd`` for a call that ``hopper.fits``."""
    batch, heads, seq_q, head_dim = q.shape
    out = new_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    half = FORWARD_ROWS // 2
    launch(
        hopper_fwd_kernel, (cdiv(seq_q, FORWARD_ROWS), heads, batch),
        _descriptor(q, half), _descriptor(k, KEYS), _descriptor(v, KEYS), _descriptor(out, half),
        lse, seq_q, k.shape[2], options.scale * LOG2_E,
        CAUSAL=options.causal, GROUP=heads // k.shape[1], BLOCK_M=FORWARD_ROWS, BLOCK_N=KEYS,
        HEAD_DIM=head_dim, STAGES=STAGES, num_warps=4, on=q,
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``reference.attention_bwd`` for a call that ``hopper.fits``: dq, dk, dv."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    dout = dout if addressable(dout) else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    tiles = cdiv(seq_q, BACKWARD_ROWS)
    padded, all_rows = tiles * BACKWARD_ROWS, batch * heads * tiles * BACKWARD_ROWS
    stats = lse.new_empty(2 * all_rows)
    launch(
        hopper_statistics_kernel, (tiles, heads, batch),
        dout, out, lse.contiguous(), lse if dlse is None else dlse.contiguous(), stats,
        *dout.stride()[:3], *out.stride()[:3], heads, seq_q, padded, all_rows,
        HAS_DLSE=dlse is not None, BLOCK_M=BACKWARD_ROWS, HEAD_DIM=head_dim, num_warps=4, on=q,
    )  # fmt: skip
    sums = lse.new_zeros((batch, heads, padded, head_dim))
    turns = torch.zeros(batch * heads * tiles + 1, dtype=torch.int32, device=q.device)
    stats_layout = gl.NVMMASharedLayout(0, 32, rank=1)
    stats_tiles: Any = TensorDescriptor(stats, [2 * all_rows], [1], [BACKWARD_ROWS], stats_layout)
    dk, dv = new_like(k), new_like(v)
    keys, rows = KEYS, BACKWARD_ROWS
    launch(
        hopper_bwd_kernel, (cdiv(seq_k, KEYS) * kv_heads * batch,),
        _descriptor(q, rows), _descriptor(k, keys), _descriptor(v, keys), _descriptor(dout, rows),
        stats_tiles, _descriptor(dk, keys), _descriptor(dv, keys), sums, turns, turns[-1:],
        seq_q, seq_k, kv_heads, all_rows, options.scale, options.scale * LOG2_E,
        CAUSAL=options.causal, GROUP=heads // kv_heads, BLOCK_M=rows, BLOCK_N=keys,
        HEAD_DIM=head_dim, STAGES=STAGES, num_warps=8, on=q,
    )  # fmt: skip
    dq = new_like(q)
    torch.mul(sums[:, :, :seq_q], options.scale, out=dq)
    return dq, dk, dv
