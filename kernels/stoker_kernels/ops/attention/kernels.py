"""The three Triton kernels of causal attention: forward, backward for dQ, backward for dK and dV.

Two backward kernels instead of one with atomic adds: the result repeats bit for bit, and the
interpreter can run it. The softmax runs in base 2 (``exp2`` is the hardware instruction), statistics
and accumulators are fp32. The two operands of each matrix product stay in the storage dtype, for the
tensor cores, unless UPCAST asks for fp32: for fp32 inputs, and under the interpreter, whose bf16
arithmetic is wrong.

Names: BLOCK_M rows (queries) by BLOCK_N columns (keys). Each kernel walks the tiles below the diagonal
without a mask and those on it with one; padded columns lie above the diagonal of every real row, so
the causal mask covers them too. Padded rows load as zeros and are never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rows(base, stride, start, row, seq_len, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Rows start + row of one (S, D) head -> [len(row), D], zeros past seq_len."""
    # The tile's start is int64: S * stride passes 2^31; inside a tile int32 is enough.
    base += tl.cast(start, tl.int64) * stride
    dim = tl.arange(0, HEAD_DIM)
    mask = (start + row < seq_len)[:, None]
    tile = tl.load(base + row[:, None] * stride + dim[None, :], mask=mask, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store_rows(base, stride, start, row, seq_len, tile, HEAD_DIM: tl.constexpr):
    """Write tile [len(row), D] to rows start + row of one (S, D) head."""
    base += tl.cast(start, tl.int64) * stride
    dim = tl.arange(0, HEAD_DIM)
    mask = (start + row < seq_len)[:, None]
    ptrs = base + row[:, None] * stride + dim[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_tile(
    acc, highest, total, q, k_base, v_base, stride_k, stride_v, start_m, start_n, row, seq_len,
    scale_log2, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys and values into the online softmax of BLOCK_M rows."""
    column = tl.arange(0, BLOCK_N)
    k = _load_rows(k_base, stride_k, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]
    v = _load_rows(v_base, stride_v, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [M, N]
    if MASKED:
        s = tl.where((start_m + row)[:, None] >= (start_n + column)[None, :], s, -float("inf"))
    # Never -inf: the first tile a row meets holds a column it may see.
    new_highest = tl.maximum(highest, tl.max(s, 1))  # [M]
    p = tl.exp2(s - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")  # [M, D]
    return acc, new_highest, total


@triton.jit
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    heads, seq_len, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. Needs BLOCK_M % BLOCK_N == 0."""
    blocks = tl.cdiv(seq_len, BLOCK_M)
    pid = tl.program_id(0)
    start_m = (blocks - 1 - pid % blocks) * BLOCK_M  # longest rows first, short ones fill the tail
    batch_head = pid // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    k_base = k_ptr + batch * stride_kb + head * stride_kh
    v_base = v_ptr + batch * stride_vb + head * stride_vh
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    q = _load_rows(q_base, stride_qs, start_m, row, seq_len, HEAD_DIM, UPCAST)  # [M, D]

    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start_n in range(0, start_m, BLOCK_N):
        acc, highest, total = _fwd_tile(
            acc, highest, total, q, k_base, v_base, stride_ks, stride_vs, start_m, start_n, row,
            seq_len, scale_log2, False, BLOCK_N, HEAD_DIM, UPCAST,
        )  # fmt: skip
    for start_n in range(start_m, tl.minimum(start_m + BLOCK_M, seq_len), BLOCK_N):
        acc, highest, total = _fwd_tile(
            acc, highest, total, q, k_base, v_base, stride_ks, stride_vs, start_m, start_n, row,
            seq_len, scale_log2, True, BLOCK_N, HEAD_DIM, UPCAST,
        )  # fmt: skip

    out_base = out_ptr + batch * stride_ob + head * stride_oh
    _store_rows(out_base, stride_os, start_m, row, seq_len, acc / total[:, None], HEAD_DIM)
    lse = (highest + tl.log2(total)) * 0.6931471805599453  # ln 2: back to natural logarithms
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_len + start_m + row
    tl.store(lse_ptrs, lse, mask=start_m + row < seq_len)


@triton.jit
def _dq_tile(
    dq, q, dout, lse_log2, delta, k_base, v_base, stride_k, stride_v, start_m, start_n, row,
    seq_len, scale_log2, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [M, D] (unscaled)."""
    column = tl.arange(0, BLOCK_N)
    k = _load_rows(k_base, stride_k, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]
    v = _load_rows(v_base, stride_v, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [M, N]
    if MASKED:  # before exp2, which would overflow above the diagonal
        s = tl.where((start_m + row)[:, None] >= (start_n + column)[None, :], s, -float("inf"))
    p = tl.exp2(s - lse_log2[:, None])
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [M, N]
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def attention_bwd_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, heads, seq_len, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M rows, and delta = sum(dout * out), which the dK/dV kernel reads.

    dq shares out's strides.
    """
    blocks = tl.cdiv(seq_len, BLOCK_M)
    pid = tl.program_id(0)
    start_m = (blocks - 1 - pid % blocks) * BLOCK_M
    batch_head = pid // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    in_range = start_m + row < seq_len
    k_base = k_ptr + batch * stride_kb + head * stride_kh
    v_base = v_ptr + batch * stride_vb + head * stride_vh
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh
    out_offset = batch * stride_ob + head * stride_oh
    q = _load_rows(q_base, stride_qs, start_m, row, seq_len, HEAD_DIM, UPCAST)  # [M, D]
    dout = _load_rows(dout_base, stride_gs, start_m, row, seq_len, HEAD_DIM, UPCAST)
    out = _load_rows(out_ptr + out_offset, stride_os, start_m, row, seq_len, HEAD_DIM, True)
    stats = batch_head.to(tl.int64) * seq_len + start_m + row  # [M]
    lse_log2 = tl.load(lse_ptr + stats, mask=in_range, other=0.0) * 1.4426950408889634
    delta = tl.sum(dout.to(tl.float32) * out, 1)  # [M]
    tl.store(delta_ptr + stats, delta, mask=in_range)

    dq = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    scale_log2 = scale * 1.4426950408889634
    for start_n in range(0, start_m, BLOCK_N):
        dq = _dq_tile(
            dq, q, dout, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, start_n,
            row, seq_len, scale_log2, False, BLOCK_N, HEAD_DIM, UPCAST,
        )  # fmt: skip
    for start_n in range(start_m, tl.minimum(start_m + BLOCK_M, seq_len), BLOCK_N):
        dq = _dq_tile(
            dq, q, dout, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, start_n,
            row, seq_len, scale_log2, True, BLOCK_N, HEAD_DIM, UPCAST,
        )  # fmt: skip
    _store_rows(dq_ptr + out_offset, stride_os, start_m, row, seq_len, dq * scale, HEAD_DIM)


@triton.jit
def _dkv_tile(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, stride_q, stride_g, start_m, start_n,
    column, seq_len, scale_log2, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk (unscaled) and dv, both [N, D]; scores are transposed, [N, M]."""
    row = tl.arange(0, BLOCK_M)
    in_range = start_m + row < seq_len
    q = _load_rows(q_base, stride_q, start_m, row, seq_len, HEAD_DIM, UPCAST)  # [M, D]
    dout = _load_rows(dout_base, stride_g, start_m, row, seq_len, HEAD_DIM, UPCAST)  # [M, D]
    lse_log2 = tl.load(lse_base + start_m + row, mask=in_range, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_base + start_m + row, mask=in_range, other=0.0)  # [M]
    s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2  # [N, M]
    if MASKED:  # before exp2, which would overflow above the diagonal
        s = tl.where((start_m + row)[None, :] >= (start_n + column)[:, None], s, -float("inf"))
    p = tl.exp2(s - lse_log2[None, :])
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")  # [N, M]
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def attention_bwd_dkv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, heads, seq_len, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N columns. Needs BLOCK_N % BLOCK_M == 0.

    dk and dv share the strides stride_o*.
    """
    blocks = tl.cdiv(seq_len, BLOCK_N)
    pid = tl.program_id(0)
    start_n = (pid % blocks) * BLOCK_N  # the first columns have the most rows below them
    batch_head = pid // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    k_base = k_ptr + batch * stride_kb + head * stride_kh
    v_base = v_ptr + batch * stride_vb + head * stride_vh
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh
    lse_base = lse_ptr + batch_head.to(tl.int64) * seq_len
    delta_base = delta_ptr + batch_head.to(tl.int64) * seq_len
    k = _load_rows(k_base, stride_ks, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]
    v = _load_rows(v_base, stride_vs, start_n, column, seq_len, HEAD_DIM, UPCAST)  # [N, D]

    dk = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    scale_log2 = scale * 1.4426950408889634
    below = tl.minimum(start_n + BLOCK_N, seq_len)
    for start_m in range(start_n, below, BLOCK_M):
        dk, dv = _dkv_tile(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, stride_qs, stride_gs, start_m,
            start_n, column, seq_len, scale_log2, True, BLOCK_M, HEAD_DIM, UPCAST,
        )  # fmt: skip
    for start_m in range(start_n + BLOCK_N, seq_len, BLOCK_M):
        dk, dv = _dkv_tile(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, stride_qs, stride_gs, start_m,
            start_n, column, seq_len, scale_log2, False, BLOCK_M, HEAD_DIM, UPCAST,
        )  # fmt: skip
    out_offset = batch * stride_ob + head * stride_oh
    _store_rows(dk_ptr + out_offset, stride_os, start_n, column, seq_len, dk * scale, HEAD_DIM)
    _store_rows(dv_ptr + out_offset, stride_os, start_n, column, seq_len, dv, HEAD_DIM)
