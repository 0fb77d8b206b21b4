"""The forward kernel of attention: online softmax over tiles of keys (see ``tiles`` for the geometry).

The softmax runs in base 2 (``exp2`` is the hardware instruction) with the scale folded into one fused
multiply-add per score; statistics and accumulators are fp32. The operands of the matrix products stay
in the storage dtype, for the tensor cores, unless UPCAST asks for fp32: for fp32 inputs, and under the
interpreter, whose bf16 arithmetic is wrong. Tiles that every row sees run without any mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.ops.attention.triton.biases import bias_base, bias_tile
from stoker_kernels.ops.attention.triton.tiles import (
    LN_2,
    columns_of,
    head_base,
    kept,
    listed,
    load_rows,
    padded,
    prefix_of,
    scored,
    sequence_of,
    slope_of,
    stats_row,
    store_rows,
    visible,
)


@triton.jit
def _fold(
    acc, highest, total, q, k_base, v_base, stride_k, stride_v, start_m, start_n, seq_q, seq_k,
    scale_log2, seed_ptr, stats, columns, threshold, slope, prefix, bias, stride_cm, reach,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PREFIX: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys and values into the online softmax of BLOCK_M rows."""
    column = tl.arange(0, BLOCK_N)
    k = load_rows(k_base, stride_k, start_n, column, seq_k, MASKED, HEAD_DIM, UPCAST)  # [N, D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    row = start_m + tl.arange(0, BLOCK_M)
    SCORED: tl.constexpr = SOFTCAP > 0.0 or ALIBI or BIAS > 0
    if SCORED:
        s, _ = scored(
            s, row[:, None], (start_n + column)[None, :], seq_q, seq_k, scale_log2, slope, SOFTCAP,
            ALIBI,
        )  # fmt: skip
    if BIAS > 0:
        s += bias_tile(
            bias, stride_cm, start_m, start_n, tl.arange(0, BLOCK_M)[:, None], column[None, :],
            seq_q, seq_k, reach, BIAS,
        )  # fmt: skip
    if MASKED:
        seen = visible(
            row[:, None], (start_n + column)[None, :], seq_q, seq_k, prefix, CAUSAL, WINDOW, PREFIX
        )
        s = tl.where(seen, s, -float("inf"))
    if SCORED:
        new_highest = tl.maximum(highest, tl.max(s, 1))  # [M]
    else:
        new_highest = tl.maximum(highest, tl.max(s, 1) * scale_log2)  # [M]
    shift = new_highest
    if MASKED or BIAS == 1:  # a row that has seen nothing yet: -inf - -inf is no number
        shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    if SCORED:  # noqa: SIM108
        p = tl.exp2(s - shift[:, None])
    else:
        p = tl.exp2(s * scale_log2 - shift[:, None])
    if v_base.dtype.element_ty == tl.float16:
        # A fused multiply-add does not round the product, shift is rounded: p is 2^8 for a score of 10^8.
        p = tl.minimum(p, 1.0, tl.PropagateNan.ALL)
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if DROPOUT:
        keep = kept(seed_ptr, stats, start_m, start_n, columns, threshold, BLOCK_M, BLOCK_N)
        p = tl.where(keep, p, 0.0)
    v = load_rows(v_base, stride_v, start_n, column, seq_k, MASKED, V_DIM, UPCAST)  # [N, D]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")  # [M, D]
    return acc, new_highest, total


@triton.jit(do_not_specialize=["first_batch", "seq_q", "seq_k", "stats_rows", "threshold"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, alibi_ptr, prefix_ptr,
    bias_ptr, stride_cb, stride_ch, stride_cm, reach, num_ptr, list_ptr, stride_nb, stride_nh, length,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    first_batch, heads, seq_q, seq_k, stats_rows, scale_log2, threshold, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    UPCAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    LISTED_M: tl.constexpr, LISTED_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. seq_q, seq_k are the longest sequence's under VARLEN.

    Programs of a head, and of the GROUP heads that share keys, are neighbours: they meet in L2. Within
    a head the longest rows go first, and the short ones fill the tail.
    """
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    batch = first_batch + tl.program_id(2)
    columns = seq_k  # numbers the dropout mask
    first_q, seq_q = sequence_of(cu_q_ptr, batch, seq_q, VARLEN)
    first_k, seq_k = sequence_of(cu_k_ptr, batch, seq_k, VARLEN)
    if VARLEN:  # noqa: SIM102  (a constant and a runtime condition)
        if start_m >= seq_q:
            return
    stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
    q_base = head_base(q_ptr, batch, head, first_q, stride_qb, stride_qh, stride_qs)
    k_base = head_base(k_ptr, batch, head // GROUP, first_k, stride_kb, stride_kh, stride_ks)
    v_base = head_base(v_ptr, batch, head // GROUP, first_k, stride_vb, stride_vh, stride_vs)
    out_base = head_base(out_ptr, batch, head, first_q, stride_ob, stride_oh, stride_os)
    row = tl.arange(0, BLOCK_M)
    q = load_rows(q_base, stride_qs, start_m, row, seq_q, True, HEAD_DIM, UPCAST)  # [M, D]

    acc = tl.zeros([BLOCK_M, padded(V_DIM)], dtype=tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    slope = slope_of(alibi_ptr, head, heads)
    PREFIX: tl.constexpr = prefix_ptr is not None
    prefix = prefix_of(prefix_ptr, batch, seq_k, PREFIX)
    bias = bias_base(bias_ptr, batch, head, heads, stride_cb, stride_ch, reach, BIAS)
    first, lead, full, end = columns_of(
        start_m, seq_q, seq_k, prefix, CAUSAL, WINDOW, PREFIX, BLOCK_M, BLOCK_N
    )
    blocks = list_ptr
    if LISTED_N > 0:  # the loop without masks has nothing to do
        count, blocks = listed(
            num_ptr, list_ptr, batch, head, start_m // LISTED_M, stride_nb, stride_nh, length
        )
        lead = 0
        full = 0
        end = count * LISTED_N
    for start_n in range(lead, full, BLOCK_N):
        acc, highest, total = _fold(
            acc, highest, total, q, k_base, v_base, stride_ks, stride_vs, start_m, start_n, seq_q,
            seq_k, scale_log2, seed_ptr, stats, columns, threshold, slope, prefix, bias, stride_cm, reach,
            False, CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
            WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
        )  # fmt: skip
    if WINDOW > 0 and LISTED_N == 0:  # the tiles on both sides of those above
        begin = first
        gap = full - lead
        end -= gap
    else:
        begin = full
        gap = 0
    for step in range(begin, end, BLOCK_N):
        start_n = step
        if LISTED_N > 0:
            start_n = tl.load(blocks + step // LISTED_N) * LISTED_N + step % LISTED_N
        elif WINDOW > 0:
            start_n = tl.where(step < lead, step, step + gap)
        acc, highest, total = _fold(
            acc, highest, total, q, k_base, v_base, stride_ks, stride_vs, start_m, start_n, seq_q,
            seq_k, scale_log2, seed_ptr, stats, columns, threshold, slope, prefix, bias, stride_cm, reach,
            True, CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
            WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
        )  # fmt: skip

    # A row that saw nothing has total 0 and highest -inf: output 0, lse -inf.
    total = tl.where(total == 0.0, 1.0, total)
    norm = 1.0 / total
    if DROPOUT:
        norm *= keep_scale
    store_rows(out_base, stride_os, start_m, row, seq_q, acc * norm[:, None], V_DIM)
    lse = (highest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + stats + start_m + row, lse, mask=start_m + row < seq_q)
