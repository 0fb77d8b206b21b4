"""The two backward kernels of attention, dQ and dK + dV (see ``tiles`` for the geometry).

Two kernels instead of one with atomic adds: the result repeats bit for bit, and the interpreter can run
it. The price is that scores and dP are computed twice, 7 products where 5 would do. The dQ kernel runs
first and leaves per row what the other reads: the base-2 log-sum-exp and delta, (2, rows) fp32.

Scores are recomputed, and a large score is rounded differently than in the forward kernel: the exponent
is held at 0 so that a probability stays within 1, however large the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.ops.attention.triton.biases import bias_base, bias_tile
from stoker_kernels.ops.attention.triton.tiles import (
    LOG2_E,
    columns_of,
    head_base,
    kept,
    listed,
    load_rows,
    padded,
    prefix_of,
    rows_of,
    scored,
    sequence_of,
    slope_of,
    stats_row,
    store_rows,
    visible,
)


@triton.jit
def _dq_tile(
    dq, q, dout, lse, delta, k_base, v_base, stride_k, stride_v, start_m, start_n, seq_q, seq_k,
    scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope, prefix, bias, stride_cm,
    reach,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PREFIX: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [M, D] (unscaled)."""
    column = tl.arange(0, BLOCK_N)
    k = load_rows(k_base, stride_k, start_n, column, seq_k, MASKED, HEAD_DIM, UPCAST)  # [N, D]
    v = load_rows(v_base, stride_v, start_n, column, seq_k, MASKED, V_DIM, UPCAST)  # [N, D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [M, N]
    row = start_m + tl.arange(0, BLOCK_M)
    SCORED: tl.constexpr = SOFTCAP > 0.0 or ALIBI or BIAS > 0
    if SCORED:
        s, inner = scored(
            s, row[:, None], (start_n + column)[None, :], seq_q, seq_k, scale_log2, slope, SOFTCAP,
            ALIBI,
        )  # fmt: skip
        if BIAS > 0:
            s += bias_tile(
                bias, stride_cm, start_m, start_n, tl.arange(0, BLOCK_M)[:, None], column[None, :],
                seq_q, seq_k, reach, BIAS,
            )  # fmt: skip
        p = tl.exp2(tl.minimum(s - lse[:, None], 0.0, tl.PropagateNan.ALL))
    else:
        inner = 1.0
        p = tl.exp2(tl.minimum(s * scale_log2 - lse[:, None], 0.0, tl.PropagateNan.ALL))
    if MASKED:
        seen = visible(
            row[:, None], (start_n + column)[None, :], seq_q, seq_k, prefix, CAUSAL, WINDOW, PREFIX
        )
        p = tl.where(seen, p, 0.0)
    if DROPOUT:
        keep = kept(seed_ptr, stats, start_m, start_n, columns, threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if SCORED:
        ds *= inner
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(
    do_not_specialize=["first_batch", "seq_q", "seq_k", "stats_rows", "all_rows", "threshold"]
)
def attention_bwd_dq_kernel(
    dout_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stats_ptr, dq_ptr, seed_ptr,
    cu_q_ptr, cu_k_ptr, alibi_ptr, prefix_ptr, bias_ptr, stride_cb, stride_ch, stride_cm, reach,
    num_ptr, list_ptr, stride_nb, stride_nh, length,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    first_batch, heads, seq_q, seq_k, stats_rows, all_rows, scale, threshold, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    UPCAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    LISTED_M: tl.constexpr, LISTED_N: tl.constexpr,
):  # fmt: skip
    """One program: dq and the statistics of BLOCK_M rows, ordered as in the forward kernel.

    delta = sum(dout * out) - dlse. dq shares out's strides; ``all_rows`` is the length of lse.
    """
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    batch = first_batch + tl.program_id(2)
    columns = seq_k
    first_q, seq_q = sequence_of(cu_q_ptr, batch, seq_q, VARLEN)
    first_k, seq_k = sequence_of(cu_k_ptr, batch, seq_k, VARLEN)
    if VARLEN:  # noqa: SIM102  (a constant and a runtime condition)
        if start_m >= seq_q:
            return
    stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
    q_base = head_base(q_ptr, batch, head, first_q, stride_qb, stride_qh, stride_qs)
    k_base = head_base(k_ptr, batch, head // GROUP, first_k, stride_kb, stride_kh, stride_ks)
    v_base = head_base(v_ptr, batch, head // GROUP, first_k, stride_vb, stride_vh, stride_vs)
    dout_base = head_base(dout_ptr, batch, head, first_q, stride_gb, stride_gh, stride_gs)
    out_base = head_base(out_ptr, batch, head, first_q, stride_ob, stride_oh, stride_os)
    if V_DIM != HEAD_DIM:  # both lie densely: the strides are proportional
        stride_db = stride_ob // V_DIM * HEAD_DIM
        stride_dh = stride_oh // V_DIM * HEAD_DIM
        stride_ds = stride_os // V_DIM * HEAD_DIM
    else:
        stride_db = stride_ob
        stride_dh = stride_oh
        stride_ds = stride_os
    dq_base = head_base(dq_ptr, batch, head, first_q, stride_db, stride_dh, stride_ds)
    row = tl.arange(0, BLOCK_M)
    out = load_rows(out_base, stride_os, start_m, row, seq_q, True, V_DIM, True)  # [M, D]
    dout = load_rows(dout_base, stride_gs, start_m, row, seq_q, True, V_DIM, UPCAST)
    q = load_rows(q_base, stride_qs, start_m, row, seq_q, True, HEAD_DIM, UPCAST)
    delta = tl.sum(dout.to(tl.float32) * out, 1)  # [M]
    place = stats + start_m + row  # [M] int64
    in_range = start_m + row < seq_q
    lse = tl.load(lse_ptr + place, mask=in_range, other=0.0)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place, mask=in_range, other=0.0)
    # A row that saw nothing is masked in every tile it meets, but 0 * delta must be 0 there.
    delta = tl.where(lse == -float("inf"), 0.0, delta)
    if BIAS == 1:  # a bias of -inf hides columns without a mask: e^(-inf - -inf) is no number
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
    lse *= LOG2_E
    tl.store(stats_ptr + place, lse, mask=in_range)
    tl.store(stats_ptr + all_rows + place, delta, mask=in_range)

    dq = tl.zeros([BLOCK_M, padded(HEAD_DIM)], dtype=tl.float32)
    scale_log2 = scale * LOG2_E
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
        dq = _dq_tile(
            dq, q, dout, lse, delta, k_base, v_base, stride_ks, stride_vs, start_m, start_n, seq_q,
            seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope,
            prefix, bias, stride_cm, reach,
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
        dq = _dq_tile(
            dq, q, dout, lse, delta, k_base, v_base, stride_ks, stride_vs, start_m, start_n, seq_q,
            seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope,
            prefix, bias, stride_cm, reach,
            True, CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
            WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
        )  # fmt: skip
    store_rows(dq_base, stride_ds, start_m, row, seq_q, dq * scale, HEAD_DIM)


@triton.jit
def load_stats(base, start, row, rows, BOUNDED: tl.constexpr):
    """One number per row. A padded row adds nothing, since its q and dout are 0: any number serves."""
    if BOUNDED:
        return tl.load(base + start + row, mask=start + row < rows, other=0.0)
    return tl.load(base + start + row)


@triton.jit
def _dkv_tile(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, stride_q, stride_g, start_m, start_n,
    seq_q, seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope, prefix, bias,
    stride_cm, reach,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PREFIX: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv, both [N, D] and unscaled; scores are transposed, [N, M]."""
    row = tl.arange(0, BLOCK_M)
    q = load_rows(q_base, stride_q, start_m, row, seq_q, MASKED, HEAD_DIM, UPCAST)  # [M, D]
    lse = load_stats(lse_base, start_m, row, seq_q, MASKED)  # [M], base 2
    s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [N, M]
    column = start_n + tl.arange(0, BLOCK_N)
    SCORED: tl.constexpr = SOFTCAP > 0.0 or ALIBI or BIAS > 0
    if SCORED:
        s, inner = scored(
            s, (start_m + row)[None, :], column[:, None], seq_q, seq_k, scale_log2, slope, SOFTCAP,
            ALIBI,
        )  # fmt: skip
        if BIAS > 0:
            s += bias_tile(
                bias, stride_cm, start_m, start_n, row[None, :], tl.arange(0, BLOCK_N)[:, None],
                seq_q, seq_k, reach, BIAS,
            )  # fmt: skip
        p = tl.exp2(tl.minimum(s - lse[None, :], 0.0, tl.PropagateNan.ALL))
    else:
        inner = 1.0
        p = tl.exp2(tl.minimum(s * scale_log2 - lse[None, :], 0.0, tl.PropagateNan.ALL))
    if MASKED and (CAUSAL or WINDOW > 0):
        seen = visible(
            (start_m + row)[None, :], column[:, None], seq_q, seq_k, prefix, CAUSAL, WINDOW, PREFIX
        )
        p = tl.where(seen, p, 0.0)
    dout = load_rows(dout_base, stride_g, start_m, row, seq_q, MASKED, V_DIM, UPCAST)  # [M, D]
    if DROPOUT:
        keep = kept(seed_ptr, stats, start_m, start_n, columns, threshold, BLOCK_M, BLOCK_N)
        keep = tl.trans(keep)  # [N, M]
        dv = tl.dot(tl.where(keep, p, 0.0).to(dout.dtype), dout, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")  # [N, M]
        dp = tl.where(keep, dp * keep_scale, 0.0)
    else:
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    delta = load_stats(delta_base, start_m, row, seq_q, MASKED)  # [M]
    ds = p * (dp - delta[None, :])
    if SCORED:
        ds *= inner
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def member_of(step, tiles, GROUP: tl.constexpr):
    """One loop over the group's heads and each head's tiles -> head, tile. Nested loops would drain the

    pipeline at every head, and keep more registers alive. The pipeline runs ahead, also where there are no
    tiles: a division by 0 is undefined, and the compiler would conclude that there are some, and load them.
    """
    if GROUP == 1:  # noqa: SIM108
        member = 0
    else:
        member = step // tl.maximum(tiles, 1)
    return member, step - member * tiles


@triton.jit(
    do_not_specialize=["first_batch", "seq_q", "seq_k", "stats_rows", "all_rows", "threshold"]
)
def attention_bwd_dkv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, stats_ptr, dk_ptr, dv_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
    alibi_ptr, prefix_ptr, bias_ptr, stride_cb, stride_ch, stride_cm, reach, num_ptr, list_ptr,
    stride_nb, stride_nh, length,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    first_batch, heads, seq_q, seq_k, stats_rows, all_rows, scale, threshold, keep_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, EDGE_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, UPCAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, LISTED_M: tl.constexpr, LISTED_N: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N columns of one key head, summed over its GROUP query heads.

    ``heads`` counts query heads; dk and dv share the strides o. Under the causal mask the first columns
    are seen by most rows: longest first again.
    """
    start_n = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    batch = first_batch + tl.program_id(2)
    columns = seq_k
    first_q, seq_q = sequence_of(cu_q_ptr, batch, seq_q, VARLEN)
    first_k, seq_k = sequence_of(cu_k_ptr, batch, seq_k, VARLEN)
    if VARLEN:  # noqa: SIM102  (a constant and a runtime condition)
        if start_n >= seq_k:
            return
    column = tl.arange(0, BLOCK_N)
    k_base = head_base(k_ptr, batch, kv_head, first_k, stride_kb, stride_kh, stride_ks)
    v_base = head_base(v_ptr, batch, kv_head, first_k, stride_vb, stride_vh, stride_vs)
    k = load_rows(k_base, stride_ks, start_n, column, seq_k, True, HEAD_DIM, UPCAST)  # [N, D]
    v = load_rows(v_base, stride_vs, start_n, column, seq_k, True, V_DIM, UPCAST)  # [N, D]

    dk = tl.zeros([BLOCK_N, padded(HEAD_DIM)], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, padded(V_DIM)], dtype=tl.float32)
    scale_log2 = scale * LOG2_E
    PREFIX: tl.constexpr = prefix_ptr is not None
    prefix = prefix_of(prefix_ptr, batch, seq_k, PREFIX)
    first, full, tail, edges = rows_of(
        start_n, seq_q, seq_k, prefix, CAUSAL, WINDOW, PREFIX, BLOCK_M, BLOCK_N, EDGE_M
    )
    q_base = head_base(q_ptr, batch, kv_head * GROUP, first_q, stride_qb, stride_qh, stride_qs)
    dout_base = head_base(
        dout_ptr, batch, kv_head * GROUP, first_q, stride_gb, stride_gh, stride_gs
    )
    if LISTED_M > 0:
        for member in range(0, GROUP):
            head = kv_head * GROUP + member
            count, blocks = listed(
                num_ptr, list_ptr, batch, head, start_n // LISTED_N, stride_nb, stride_nh, length
            )
            for step in range(0, count * (LISTED_M // EDGE_M)):
                PER: tl.constexpr = LISTED_M // EDGE_M
                start_m = tl.load(blocks + step // PER) * LISTED_M + step % PER * EDGE_M
                stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
                skip = tl.cast(member, tl.int64)
                slope = slope_of(alibi_ptr, head, heads)
                bias = bias_base(bias_ptr, batch, head, heads, stride_cb, stride_ch, reach, BIAS)
                dk, dv = _dkv_tile(
                    dk, dv, k, v, q_base + skip * stride_qh, dout_base + skip * stride_gh,
                    stats_ptr + stats, stats_ptr + all_rows + stats, stride_qs, stride_gs, start_m, start_n,
                    seq_q, seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope,
                    prefix, bias, stride_cm, reach,
                    True, CAUSAL, DROPOUT, EDGE_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
                    WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
                )  # fmt: skip
    else:
        for step in range(0, GROUP * edges):
            member, tile = member_of(step, edges, GROUP)
            start_m = first + tile * EDGE_M
            start_m = tl.where(start_m < full, start_m, start_m - full + tail)
            head = kv_head * GROUP + member
            stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
            skip = tl.cast(member, tl.int64)
            slope = slope_of(alibi_ptr, head, heads)
            bias = bias_base(bias_ptr, batch, head, heads, stride_cb, stride_ch, reach, BIAS)
            dk, dv = _dkv_tile(
                dk, dv, k, v, q_base + skip * stride_qh, dout_base + skip * stride_gh,
                stats_ptr + stats, stats_ptr + all_rows + stats, stride_qs, stride_gs, start_m, start_n,
                seq_q, seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope,
                prefix, bias, stride_cm, reach,
                True, CAUSAL, DROPOUT, EDGE_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
                WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
            )  # fmt: skip
        # Padded columns collect garbage in rows of dk and dv that are not stored: no mask for them.
        whole = (tail - full) // BLOCK_M
        for step in range(0, GROUP * whole):
            member, tile = member_of(step, whole, GROUP)
            start_m = full + tile * BLOCK_M
            head = kv_head * GROUP + member
            stats = stats_row(batch, head, heads, first_q, stats_rows, VARLEN)
            skip = tl.cast(member, tl.int64)
            slope = slope_of(alibi_ptr, head, heads)
            bias = bias_base(bias_ptr, batch, head, heads, stride_cb, stride_ch, reach, BIAS)
            dk, dv = _dkv_tile(
                dk, dv, k, v, q_base + skip * stride_qh, dout_base + skip * stride_gh,
                stats_ptr + stats, stats_ptr + all_rows + stats, stride_qs, stride_gs, start_m, start_n,
                seq_q, seq_k, scale_log2, seed_ptr, stats, columns, threshold, keep_scale, slope,
                prefix, bias, stride_cm, reach,
                False, CAUSAL, DROPOUT, BLOCK_M, BLOCK_N, HEAD_DIM, V_DIM, UPCAST,
                WINDOW, SOFTCAP, alibi_ptr is not None, PREFIX, BIAS,
            )  # fmt: skip
    if DROPOUT:
        dv *= keep_scale
    if VARLEN:  # read again rather than kept in registers
        first_k, seq_k = sequence_of(cu_k_ptr, batch, 0, VARLEN)
    if V_DIM != HEAD_DIM:  # both lie densely: the strides are proportional
        stride_eb = stride_ob // HEAD_DIM * V_DIM
        stride_eh = stride_oh // HEAD_DIM * V_DIM
        stride_es = stride_os // HEAD_DIM * V_DIM
    else:
        stride_eb = stride_ob
        stride_eh = stride_oh
        stride_es = stride_os
    dk_base = head_base(dk_ptr, batch, kv_head, first_k, stride_ob, stride_oh, stride_os)
    dv_base = head_base(dv_ptr, batch, kv_head, first_k, stride_eb, stride_eh, stride_es)
    store_rows(dk_base, stride_os, start_n, column, seq_k, dk * scale, HEAD_DIM)
    store_rows(dv_base, stride_es, start_n, column, seq_k, dv, V_DIM)
