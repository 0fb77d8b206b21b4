"""The launchers of the attention kernels: strides, output buffers, tile sizes from ``tuning``.

Limit: compute. FLOPs, full attention: forward 4*B*H*S_q*S_k*D, backward 2.5 times that; causal half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stoker_kernels.ops.attention.reference import bias_of, new_like
from stoker_kernels.ops.attention.triton.backward import (
    attention_bwd_dkv_kernel,
    attention_bwd_dq_kernel,
)
from stoker_kernels.ops.attention.triton.bias_gradient import (
    attention_bwd_bias_kernel,
    attention_bwd_table_kernel,
)
from stoker_kernels.ops.attention.triton.biases import DENSE, RELATIVE
from stoker_kernels.ops.attention.triton.configs import candidates, config
from stoker_kernels.ops.attention.triton.forward import attention_fwd_kernel
from stoker_kernels.primitives.partials import sum_partials
from stoker_kernels.primitives.tiling import cdiv, power_of_2
from stoker_kernels.runtime.launch import device_of, is_interpreted, launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_kernels.ops.attention.reference import Options

LOG2_E = 1.4426950408889634
MAX_GRID = 65535  # programs along the grid's second and third dimension
MAX_ROW_STRIDE = 2**23  # a tile's 128 rows, times this, stay within int32


def _addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy where the kernels could not address its rows."""
    rows = -2 if tensor.ndim == 4 else 0
    if tensor.stride(-1) == 1 and tensor.stride(rows) <= MAX_ROW_STRIDE:
        return tensor
    return tensor.contiguous()


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return strides of batch, head and row; packed tensors (T, H, D) have no batch."""
    if tensor.ndim == 4:
        return tensor.stride(0), tensor.stride(1), tensor.stride(2)
    return 0, tensor.stride(1), tensor.stride(0)


def _lists(num: torch.Tensor, indices: torch.Tensor | None) -> list[Any]:
    """Return the lists num (b, h, R), indices (b, h, R, C) of a block mask as the kernels take them."""
    assert indices is not None
    batch, heads, rows = num.shape
    strides = heads * rows if batch > 1 else 0, rows if heads > 1 else 0
    return [num.contiguous(), indices.contiguous(), *strides, indices.shape[3]]


class _Call:
    """One call's sizes and switches, as the three kernels take them."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
        self.q, self.options = q, options
        self.heads, kv_heads, self.head_dim = q.shape[1], k.shape[1], q.shape[-1]
        self.v_dim = v.shape[-1]
        self.kv_heads = kv_heads
        cu_q, cu_k = options.cu_seqlens_q, options.cu_seqlens_k
        if cu_q is None or cu_k is None:
            self.batch, self.seq_q, self.seq_k = q.shape[0], q.shape[2], k.shape[2]
            self.stats_rows = self.seq_q
            self.cu: tuple[torch.Tensor, torch.Tensor] = (q, q)  # not read
        else:
            self.batch, self.stats_rows = len(cu_q) - 1, q.shape[0]
            self.seq_q, self.seq_k = options.max_seqlen_q, options.max_seqlen_k
            self.cu = (cu_q.contiguous(), cu_k.contiguous())
        slopes = options.alibi_slopes
        self.slopes = None if slopes is None else slopes.contiguous()
        # One that hides nothing is none: the plain kernel runs, and lengths do not compile anew.
        longest = self.seq_k if options.causal else max(self.seq_q, self.seq_k)
        window = options.window if options.window < longest else 0
        self._shape_scores(q)
        self.seed = q if options.seed is None else options.seed
        self.switches: dict[str, Any] = {
            "GROUP": self.heads // kv_heads,
            "CAUSAL": options.causal,
            "VARLEN": options.packed,
            "DROPOUT": options.seed is not None,
            "HEAD_DIM": self.head_dim,
            "V_DIM": self.v_dim,
            "WINDOW": window,
            "SOFTCAP": options.softcap,
            "BIAS": self.bias_kind,
            "LISTED_M": options.block_size_q,
            "LISTED_N": options.block_size_k,
            "UPCAST": q.dtype == torch.float32 or is_interpreted(attention_fwd_kernel),
        }

    def _shape_scores(self, q: torch.Tensor) -> None:
        """Set what the kernels take for a prefix, a bias and a block mask: None where there is none."""
        options = self.options
        prefix, self.bias_kind = options.prefix_lengths, 0
        # The prefix; then the bias, its strides, and the reach of its distances.
        self.scores: list[Any] = [None if prefix is None else prefix.contiguous(), *[None] * 5]
        self.buckets: torch.Tensor | None = None
        if options.bias is not None:
            self.bias_kind, bias = DENSE, options.bias
            if bias.stride(3) != 1 or bias.stride(2) > MAX_ROW_STRIDE:
                bias = bias.contiguous()
            shared = [0 if bias.shape[dim] == 1 else bias.stride(dim) for dim in (0, 1)]
            self.scores[1:5] = bias, *shared, bias.stride(2)
        elif options.relative_table is not None and options.relative_buckets is not None:
            self.bias_kind, self.buckets = RELATIVE, options.relative_buckets.contiguous()
            table = options.relative_table.to(torch.float32) * LOG2_E
            self.scores[1] = table[self.buckets].T.contiguous()  # (H, distances)
            self.scores[5] = len(self.buckets) // 2
        self.lists: list[Any] = [None] * 5  # by rows: num, list, strides in lists, their length
        self.transposed: list[Any] = [None] * 5
        if options.kv_num_blocks is not None and options.q_num_blocks is not None:
            self.lists = _lists(options.kv_num_blocks, options.kv_indices)
            self.transposed = _lists(options.q_num_blocks, options.q_indices)

    def grids(
        self, length: int, block: int, heads: int
    ) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield the launches that cover all sequences: the first of each, and (tiles, heads, sequences)."""
        if heads > MAX_GRID:
            raise ValueError(f"attention takes at most {MAX_GRID} heads on the GPU, got {heads}")
        for first in range(0, self.batch, MAX_GRID):
            yield first, (cdiv(length, block), heads, min(self.batch - first, MAX_GRID))

    def config(self, kernel: str) -> Config:
        """Return the tuned tile sizes of ``kernel``, or the heuristic; no tile wider than a block mask's."""
        tile = dict(self._chosen(kernel))
        if self.options.block_size_q:
            tile["BLOCK_M"] = min(tile["BLOCK_M"], self.options.block_size_q)
            tile["BLOCK_N"] = min(tile["BLOCK_N"], self.options.block_size_k)
        return tile

    def _chosen(self, kernel: str) -> Config:
        device = device_of(attention_fwd_kernel, self.q)
        widest = power_of_2(max(self.head_dim, self.v_dim))
        scored = self.options.scored
        dropout = self.switches["DROPOUT"]
        case = (kernel, widest, self.q.element_size(), device, dropout, scored)
        more: dict[str, Any] = {"v_dim": self.v_dim} if self.v_dim != self.head_dim else {}
        if scored:
            more |= {
                "windowed": bool(self.switches["WINDOW"]), "capped": bool(self.options.softcap),
                "alibi": self.slopes is not None, "bias": self.bias_kind,
                "prefix": self.scores[0] is not None, "listed": self.lists[0] is not None,
            }  # fmt: skip
        return choose(
            kernel, config(*case), lambda: candidates(*case),
            head_dim=self.head_dim, dtype=self.q.dtype, causal=self.options.causal,
            varlen=self.options.packed, dropout=self.switches["DROPOUT"],
            group=self.switches["GROUP"], **more,
        )  # fmt: skip


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.attention_fwd`` on the GPU."""
    call = _Call(q, k, v, options)
    q, k, v = _addressable(q), _addressable(k), _addressable(v)
    out = new_like(q, call.v_dim)
    if options.packed:  # nobody writes the rows behind the last sequence
        lse = q.new_full((call.heads, q.shape[0]), float("-inf"), dtype=torch.float32)
    else:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = call.config("attention_fwd")
    for first_batch, grid in call.grids(call.seq_q, tile["BLOCK_M"], call.heads):
        launch(
            attention_fwd_kernel, grid,
            q, k, v, out, lse, call.seed, *call.cu, call.slopes, *call.scores, *call.lists,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out),
            first_batch, call.heads, call.seq_q, call.seq_k, call.stats_rows,
            options.scale * LOG2_E, options.threshold, options.keep_scale,
            on=q, **call.switches, **tile,
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
    biased: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Compute ``reference.attention_bwd`` on the GPU."""
    call = _Call(q, k, v, options)
    dout, q, k, v = (_addressable(t) for t in (dout, q, k, v))
    dq, dk, dv = new_like(q), new_like(k), new_like(v)
    dense = new_like(q, call.v_dim) if call.v_dim != call.head_dim else dq
    if out.stride() != dense.stride():
        out = new_like(q, call.v_dim).copy_(out)
    lse = lse.contiguous()
    stats = lse.new_empty((2, lse.numel()))
    inputs = _strides(dout), _strides(q), _strides(k), _strides(v)
    strides = [stride for strides in inputs for stride in strides]
    sizes = (call.heads, call.seq_q, call.seq_k, call.stats_rows, lse.numel(), options.scale)
    dropout = (options.threshold, options.keep_scale)
    tile = call.config("attention_bwd_dq")
    dlse_or_lse = lse if dlse is None else dlse.contiguous()
    for first_batch, grid in call.grids(call.seq_q, tile["BLOCK_M"], call.heads):
        launch(
            attention_bwd_dq_kernel, grid,
            dout, dlse_or_lse, q, k, v, out, lse, stats, dq, call.seed, *call.cu, call.slopes,
            *call.scores, *call.lists,
            *strides, *_strides(dense), first_batch, *sizes, *dropout,
            HAS_DLSE=dlse is not None, on=q, **call.switches, **tile,
        )  # fmt: skip
    tile = call.config("attention_bwd_dkv")
    for first_batch, grid in call.grids(call.seq_k, tile["BLOCK_N"], call.kv_heads):
        launch(
            attention_bwd_dkv_kernel, grid,
            dout, q, k, v, stats, dk, dv, call.seed, *call.cu, call.slopes, *call.scores, *call.transposed,
            *strides, *_strides(dk), first_batch, *sizes, *dropout,
            EDGE_M=max(16, tile["BLOCK_M"] // 2), on=q, **call.switches, **tile,
        )  # fmt: skip
    if not biased:
        return dq, dk, dv
    tensors = (dout, q, k, v)
    if call.buckets is None:
        return dq, dk, dv, _dense_gradient(call, tensors, stats)
    return dq, dk, dv, _table_gradient(call, tensors, stats, call.buckets)


def _dense_gradient(
    call: _Call, tensors: tuple[torch.Tensor, ...], stats: torch.Tensor
) -> torch.Tensor:
    """Return a dense bias's gradient, of its shape, after the dq kernel; tensors are dout, q, k, v."""
    options, switches = call.options, dict(call.switches)
    dbias = bias_of(options).new_empty(bias_of(options).shape)
    for other in ("LISTED_M", "LISTED_N", "BIAS", "VARLEN"):
        del switches[other]
    tile = call.config("attention_bwd_dq")
    tiles = cdiv(call.seq_q, tile["BLOCK_M"]) * cdiv(call.seq_k, tile["BLOCK_N"])
    for first_batch in range(0, dbias.shape[0], MAX_GRID):
        launch(
            attention_bwd_bias_kernel,
            (tiles, dbias.shape[1], min(dbias.shape[0] - first_batch, MAX_GRID)),
            *tensors, stats, dbias, call.seed, call.slopes, *call.scores[:5],
            *(stride for tensor in tensors for stride in _strides(tensor)), *dbias.stride()[:3],
            first_batch, call.batch, call.heads, call.seq_q, call.seq_k, stats.shape[1],
            options.scale, options.threshold, options.keep_scale,
            SUM_BATCH=dbias.shape[0] == 1, SUM_HEADS=dbias.shape[1] == 1, on=call.q, **switches,
            **tile,
        )  # fmt: skip
    return dbias


def _table_gradient(
    call: _Call,
    tensors: tuple[torch.Tensor, ...],
    stats: torch.Tensor,
    buckets: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of T5's table (num_buckets, H), after the dq kernel; tensors are dout, q, k, v."""
    options, switches = call.options, dict(call.switches)
    table = bias_of(options)
    del switches["BIAS"]
    tile = dict(call.config("attention_bwd_dq"))
    tile["BLOCK_N"] = min(tile["BLOCK_M"], tile["BLOCK_N"])
    low = cdiv(call.seq_q, tile["BLOCK_M"]) * tile["BLOCK_M"] // tile["BLOCK_N"]
    diagonals = low - 1 + cdiv(call.seq_k, tile["BLOCK_N"])
    width = power_of_2(len(table))
    if not (call.seq_q and call.seq_k and call.batch):
        return torch.zeros_like(table)
    sums = stats.new_empty((1, call.batch * diagonals, call.heads * width))
    for first_batch in range(0, call.batch, MAX_GRID):
        launch(
            attention_bwd_table_kernel,
            (diagonals, call.heads, min(call.batch - first_batch, MAX_GRID)),
            *tensors, stats, sums, buckets, call.seed, *call.cu, call.slopes, *call.scores[:2],
            call.scores[5], *call.lists,
            *(stride for tensor in tensors for stride in _strides(tensor)),
            first_batch, call.heads, call.seq_q, call.seq_k, call.stats_rows, stats.shape[1],
            options.scale, options.threshold, options.keep_scale, BUCKETS=width, on=call.q,
            **switches, **tile,
        )  # fmt: skip
    (total,) = sum_partials(sums, table.dtype)
    return total.view(call.heads, width)[:, : len(table)].T.contiguous()
