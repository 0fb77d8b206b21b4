"""The gradients of a dense bias and of T5's table: two products more than the other two kernels have.

A program holds one tile of sums and walks, in order, through all that shares it: no atomics, and nothing of
the size of the scores. For a dense bias those are the same places in other heads and sequences; for a table
the tiles of one diagonal, which have the same distances, so that a tile is divided into buckets once,
at the end. Both run after the dQ kernel, whose statistics they read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.ops.attention.triton.biases import bias_base, bias_tile, clipped
from stoker_kernels.ops.attention.triton.tiles import (
    LOG2_E,
    head_base,
    kept,
    listed,
    load_rows,
    prefix_of,
    scored,
    sequence_of,
    slope_of,
    stats_row,
    visible,
)


@triton.jit
def _ds_tile(
    q_base, k_base, v_base, dout_base, lse_base, delta_base, bias,
    stride_q, stride_k, stride_v, stride_g, stride_cm, reach,
    start_m, start_n, seq_q, seq_k, rows, scale, slope, prefix,
    seed_ptr, stats, columns, threshold, keep_scale,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, UPCAST: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PREFIX: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient [M, N] of a tile's scores after the cap; nothing is loaded from row ``rows`` on."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    width = tl.where(start_m < rows, seq_k, 0)  # a tile without rows loads no columns either
    q = load_rows(q_base, stride_q, start_m, row, rows, True, HEAD_DIM, UPCAST)  # [M, D]
    k = load_rows(k_base, stride_k, start_n, column, width, True, HEAD_DIM, UPCAST)  # [N, D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    s, _ = scored(
        s, (start_m + row)[:, None], (start_n + column)[None, :], seq_q, seq_k, scale * LOG2_E,
        slope, SOFTCAP, ALIBI,
    )  # fmt: skip
    s += bias_tile(
        bias, stride_cm, start_m, start_n, row[:, None], column[None, :], seq_q, seq_k, reach, BIAS
    )
    lse = tl.load(lse_base + start_m + row, mask=start_m + row < rows, other=0.0)
    delta = tl.load(delta_base + start_m + row, mask=start_m + row < rows, other=0.0)
    p = tl.exp2(tl.minimum(s - lse[:, None], 0.0, tl.PropagateNan.ALL))
    seen = visible(
        (start_m + row)[:, None], (start_n + column)[None, :], seq_q, seq_k, prefix, CAUSAL, WINDOW,
        PREFIX,
    )  # fmt: skip
    p = tl.where(seen, p, 0.0)
    dout = load_rows(dout_base, stride_g, start_m, row, rows, True, V_DIM, UPCAST)
    v = load_rows(v_base, stride_v, start_n, column, width, True, V_DIM, UPCAST)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    if DROPOUT:
        keep = kept(seed_ptr, stats, start_m, start_n, columns, threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return p * (dp - delta[:, None])


@triton.jit(do_not_specialize=["first_batch", "batches", "seq_q", "seq_k", "all_rows", "threshold"])
def attention_bwd_bias_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, stats_ptr, dbias_ptr, seed_ptr, alibi_ptr, prefix_ptr, bias_ptr,
    stride_cb, stride_ch, stride_cm,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_db, stride_dh, stride_dm,
    first_batch, batches, heads, seq_q, seq_k, all_rows, scale, threshold, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SUM_BATCH: tl.constexpr, SUM_HEADS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows by BLOCK_N columns of a dense bias, summed over heads and sequences."""
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    start_m = tl.program_id(0) // tiles_n * BLOCK_M
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    PREFIX: tl.constexpr = prefix_ptr is not None
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    count_h = heads if SUM_HEADS else 1
    count = count_h * batches if SUM_BATCH else count_h
    for step in range(0, count):
        batch = first_batch + tl.program_id(2) + step // count_h
        head = tl.program_id(1) + step % count_h
        stats = stats_row(batch, head, heads, 0, seq_q, False)
        total += _ds_tile(
            head_base(q_ptr, batch, head, 0, stride_qb, stride_qh, stride_qs),
            head_base(k_ptr, batch, head // GROUP, 0, stride_kb, stride_kh, stride_ks),
            head_base(v_ptr, batch, head // GROUP, 0, stride_vb, stride_vh, stride_vs),
            head_base(dout_ptr, batch, head, 0, stride_gb, stride_gh, stride_gs),
            stats_ptr + stats, stats_ptr + all_rows + stats,
            bias_base(bias_ptr, batch, head, heads, stride_cb, stride_ch, 0, 1),
            stride_qs, stride_ks, stride_vs, stride_gs, stride_cm, 0,
            start_m, start_n, seq_q, seq_k, seq_q, scale, slope_of(alibi_ptr, head, heads),
            prefix_of(prefix_ptr, batch, seq_k, PREFIX),
            seed_ptr, stats, seq_k, threshold, keep_scale,
            CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST, WINDOW, SOFTCAP,
            alibi_ptr is not None, PREFIX, 1,
        )  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    dbias_ptr += tl.cast(first_batch + tl.program_id(2), tl.int64) * stride_db
    dbias_ptr += tl.cast(tl.program_id(1), tl.int64) * stride_dh
    dbias_ptr += tl.cast(start_m, tl.int64) * stride_dm + start_n
    inside = (row < seq_q - start_m)[:, None] & (column < seq_k - start_n)[None, :]
    ptrs = dbias_ptr + row[:, None] * stride_dm + column[None, :]
    tl.store(ptrs, total.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def diagonal_rows(
    shift, seq_q, seq_k, prefix, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles (start_m, start_m + shift) that anything is seen in -> first start_m, and where they end."""
    offset = seq_k - seq_q
    begin = tl.cdiv(tl.maximum(-shift, 0), BLOCK_M) * BLOCK_M
    end = tl.minimum(seq_q, seq_k - shift)
    if CAUSAL:  # right of the diagonal a prefix alone is seen
        end = tl.where(shift < BLOCK_M + offset, end, tl.minimum(end, prefix - shift))
    if WINDOW > 0:
        near = (offset - shift - BLOCK_N + 1 < WINDOW) & (shift - offset - BLOCK_M + 1 < WINDOW)
        end = tl.where(near, end, begin)
    return begin, end


@triton.jit(
    do_not_specialize=["first_batch", "seq_q", "seq_k", "stats_rows", "all_rows", "threshold"]
)
def attention_bwd_table_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, stats_ptr, sums_ptr, buckets_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
    alibi_ptr, prefix_ptr, bias_ptr, reach, num_ptr, list_ptr, stride_nb, stride_nh, length,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    first_batch, heads, seq_q, seq_k, stats_rows, all_rows, scale, threshold, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    UPCAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BUCKETS: tl.constexpr,
    LISTED_M: tl.constexpr, LISTED_N: tl.constexpr,
):  # fmt: skip
    """One program: one diagonal of tiles of one head of one sequence -> a row of BUCKETS sums.

    BLOCK_M is a multiple of BLOCK_N. Diagonals are numbered from the lower left corner.
    """
    shift = (tl.program_id(0) + 1) * BLOCK_N - tl.cdiv(seq_q, BLOCK_M) * BLOCK_M
    head = tl.program_id(1)
    batch = first_batch + tl.program_id(2)
    columns = seq_k
    first_q, seq_q = sequence_of(cu_q_ptr, batch, seq_q, VARLEN)
    first_k, seq_k = sequence_of(cu_k_ptr, batch, seq_k, VARLEN)
    stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
    PREFIX: tl.constexpr = prefix_ptr is not None
    prefix = prefix_of(prefix_ptr, batch, seq_k, PREFIX)
    q_base = head_base(q_ptr, batch, head, first_q, stride_qb, stride_qh, stride_qs)
    k_base = head_base(k_ptr, batch, head // GROUP, first_k, stride_kb, stride_kh, stride_ks)
    v_base = head_base(v_ptr, batch, head // GROUP, first_k, stride_vb, stride_vh, stride_vs)
    dout_base = head_base(dout_ptr, batch, head, first_q, stride_gb, stride_gh, stride_gs)
    bias = bias_base(bias_ptr, batch, head, heads, 0, 0, reach, 2)
    slope = slope_of(alibi_ptr, head, heads)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    begin, end = diagonal_rows(shift, seq_q, seq_k, prefix, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for start_m in range(begin, end, BLOCK_M):
        rows = seq_q
        if LISTED_N > 0:
            count, blocks = listed(
                num_ptr, list_ptr, batch, head, start_m // LISTED_M, stride_nb, stride_nh, length
            )
            found = 0
            for place in range(0, count):
                found |= (tl.load(blocks + place) == (start_m + shift) // LISTED_N).to(tl.int32)
            rows = tl.where(found > 0, seq_q, 0)
        ds = _ds_tile(
            q_base, k_base, v_base, dout_base, stats_ptr + stats, stats_ptr + all_rows + stats, bias,
            stride_qs, stride_ks, stride_vs, stride_gs, 0, reach,
            start_m, start_m + shift, seq_q, seq_k, rows, scale, slope, prefix,
            seed_ptr, stats, columns, threshold, keep_scale,
            CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST, WINDOW, SOFTCAP,
            alibi_ptr is not None, PREFIX, 2,
        )  # fmt: skip
        total += ds
    row = tl.arange(0, BLOCK_M)
    column = shift + tl.arange(0, BLOCK_N)
    place = clipped(row[:, None], column[None, :], seq_q, seq_k, reach) + reach
    bucket = tl.load(buckets_ptr + place)  # [M, N]
    each = tl.arange(0, BUCKETS)
    sums = tl.zeros([BUCKETS], dtype=tl.float32)
    least, greatest = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
    for number in range(least, greatest + 1):  # a single one far off the diagonal
        one = tl.sum(tl.sum(tl.where(bucket == number, total, 0.0), 1), 0)
        sums += tl.where(each == number, one, 0.0)
    part = tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums_ptr + (part * heads + head) * BUCKETS + each, sums)
