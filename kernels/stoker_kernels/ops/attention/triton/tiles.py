"""The common parts of the three attention kernels: which sequence a program works on, loads, stores, scores.

A tile is [rows, columns] = [queries, keys] of one head, or its transpose in the dK/dV kernel. ``offset``
= S_k - S_q aligns the causal diagonal bottom-right: row i sees the columns j <= i + offset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.primitives.dropout import keep_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def padded(head_dim):
    """Width of a tile: the next power of two; what lies beyond the head is neither loaded nor stored."""
    return 1 << (head_dim - 1).bit_length()


@triton.jit
def sequence_of(cu_ptr, batch, length, VARLEN: tl.constexpr):
    """First row and number of rows of sequence ``batch``: packed between cumulative lengths, or dense."""
    if VARLEN:
        first = tl.load(cu_ptr + batch).to(tl.int32)
        last = tl.load(cu_ptr + batch + 1).to(tl.int32)
    else:
        first = 0
        last = length
    return first, last - first


@triton.jit
def stats_row(batch, head, heads, first, stats_rows, VARLEN: tl.constexpr):
    """Return where a sequence's rows begin in lse, (B, H, S) dense or (H, T) packed: int64.

    This index plus the row also numbers the rows of the dropout mask.
    """
    if VARLEN:
        return tl.cast(head, tl.int64) * stats_rows + first
    return (tl.cast(batch, tl.int64) * heads + head) * stats_rows


@triton.jit
def head_base(ptr, batch, head, first, stride_b, stride_h, stride_s):
    """Address of the first row of one head of one sequence; int64, whatever the strides."""
    ptr += tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    return ptr + tl.cast(first, tl.int64) * stride_s


@triton.jit
def load_rows(
    base, stride, start, row, rows, BOUNDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows start + row of one (S, D) head -> [len(row), padded D], zeros past ``rows`` if BOUNDED."""
    # The tile's start is int64: S * stride passes 2^31; inside a tile int32 is enough.
    WIDTH: tl.constexpr = padded(HEAD_DIM)
    ptrs = base + tl.cast(start, tl.int64) * stride
    ptrs += row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    if WIDTH != HEAD_DIM:
        inside = (tl.arange(0, WIDTH) < HEAD_DIM)[None, :]
        if BOUNDED:
            inside = inside & (row < rows - start)[:, None]
        tile = tl.load(ptrs, mask=inside, other=0.0)
    elif BOUNDED:
        # Not as store_rows compares: the compiler would keep one mask in registers for both.
        tile = tl.load(ptrs, mask=(row < rows - start)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(base, stride, start, row, rows, tile, HEAD_DIM: tl.constexpr):
    """Write tile [len(row), D] to rows start + row of one (S, D) head, none past ``rows``."""
    WIDTH: tl.constexpr = padded(HEAD_DIM)
    ptrs = base + tl.cast(start, tl.int64) * stride
    ptrs += row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    inside = (start + row < rows)[:, None]
    if WIDTH != HEAD_DIM:
        inside = inside & (tl.arange(0, WIDTH) < HEAD_DIM)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def prefix_of(prefix_ptr, batch, seq_k, PREFIX: tl.constexpr):
    """Return how many columns every row of sequence ``batch`` sees, 0 without a prefix."""
    if PREFIX:
        return tl.minimum(tl.load(prefix_ptr + batch), seq_k)
    return 0


@triton.jit
def listed(num_ptr, list_ptr, batch, head, block, stride_b, stride_h, length):
    """One list of a block mask -> how many blocks it has, and its address. ``length`` is that of any."""
    place = batch * stride_b + head * stride_h + block
    return tl.load(num_ptr + place), list_ptr + tl.cast(place, tl.int64) * length


@triton.jit
def columns_of(
    start_m, seq_q, seq_k, prefix, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns that the rows start_m .. start_m + M see -> first, lead, full, end.

    All rows see ``lead`` to ``full``, none sees what lies before ``first`` or from ``end`` on; between, a
    mask decides. The first three are multiples of N; without a window first and lead are 0.
    """
    first = 0
    lead = 0
    if WINDOW > 0:
        offset = seq_k - seq_q
        first = tl.maximum(start_m + offset - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        lead = tl.cdiv(tl.maximum(start_m + BLOCK_M + offset - WINDOW, 0), BLOCK_N) * BLOCK_N
        if CAUSAL:
            ahead = start_m + 1 + offset
            end = tl.minimum(start_m + BLOCK_M + offset, seq_k)
        else:
            ahead = start_m + offset + WINDOW
            end = tl.minimum(start_m + BLOCK_M + offset + WINDOW - 1, seq_k)
        full = tl.maximum(tl.minimum(ahead, seq_k), 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(full, first)
        lead = tl.minimum(lead, full)
    elif CAUSAL:
        offset = seq_k - seq_q
        full = tl.maximum(tl.minimum(start_m + 1 + offset, seq_k), 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(start_m + BLOCK_M + offset, seq_k)
        if PREFIX:
            full = tl.maximum(full, prefix // BLOCK_N * BLOCK_N)
            end = tl.maximum(end, prefix)
    else:
        full = seq_k // BLOCK_N * BLOCK_N
        end = seq_k
    return first, lead, full, end


@triton.jit
def rows_of(
    start_n, seq_q, seq_k, prefix, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_M: tl.constexpr,
):  # fmt: skip
    """The tiles of rows that see the columns start_n .. start_n + N -> first, full, tail, edges.

    Tiles of EDGE_M rows that need a mask, ``edges`` in all, begin at ``first`` and stop before ``full``,
    and go on from ``tail``; between ``full`` and ``tail`` lie tiles of BLOCK_M rows that need none. Rows
    before ``first`` see nothing here.
    """
    first = 0
    full = 0
    last = seq_q  # from here on no row needs to look
    whole = seq_q  # from here on not every row sees all columns
    if WINDOW > 0:
        diagonal = start_n - (seq_k - seq_q)
        last = tl.maximum(tl.minimum(diagonal + BLOCK_N - 1 + WINDOW, seq_q), 0)
        whole = tl.maximum(tl.minimum(diagonal + WINDOW, seq_q), 0)
        if CAUSAL:
            some = diagonal
            every = diagonal + BLOCK_N - 1
        else:
            some = diagonal - WINDOW + 1
            every = diagonal + BLOCK_N - WINDOW
        first = tl.minimum(tl.maximum(some, 0), seq_q) // EDGE_M * EDGE_M
        full = tl.cdiv(tl.minimum(tl.maximum(every, 0), last), EDGE_M) * EDGE_M
        full = tl.maximum(full, first)
    elif CAUSAL:
        diagonal = start_n - (seq_k - seq_q)  # the first row that sees the first column
        first = tl.minimum(tl.maximum(diagonal, 0), seq_q) // EDGE_M * EDGE_M
        full = tl.cdiv(tl.minimum(tl.maximum(diagonal + BLOCK_N - 1, 0), seq_q), EDGE_M) * EDGE_M
        if PREFIX:
            first = tl.where(start_n < prefix, 0, first)
            full = tl.where(start_n + BLOCK_N <= prefix, 0, full)
    tail = full + tl.maximum(whole - full, 0) // BLOCK_M * BLOCK_M
    edges = (full - first) // EDGE_M + tl.cdiv(tl.maximum(last - tail, 0), EDGE_M)
    return first, full, tail, edges


@triton.jit
def visible(
    row, column, seq_q, seq_k, prefix, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr,
):  # fmt: skip
    """Whether rows see columns, both broadcast against each other. The causal mask covers padded

    columns too: they lie right of the diagonal of every real row.
    """
    if WINDOW > 0:
        behind = row + (seq_k - seq_q) - column
        if CAUSAL:
            return (behind >= 0) & (behind < WINDOW)
        return (column < seq_k) & (behind < WINDOW) & (behind > -WINDOW)
    if PREFIX:
        return (row + (seq_k - seq_q) >= column) | (column < prefix)
    if CAUSAL:
        return row + (seq_k - seq_q) >= column
    return (column < seq_k) & (row >= 0)


@triton.jit
def slope_of(alibi_ptr, head, heads):
    """Return ALiBi's slope of a head, in base 2; 0 without. A pipeline runs ahead of the last head."""
    slope = 0.0
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + tl.minimum(head, heads - 1)) * LOG2_E
    return slope


@triton.jit
def scored(
    s, row, column, seq_q, seq_k, scale_log2, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):  # fmt: skip
    """Products s -> base-2 scores, capped and with ALiBi's distance; and the cap's derivative.

    row and column broadcast against each other. tanh z = (1 - e) / (1 + e), e = exp(-2 |z|).
    """
    if SOFTCAP > 0.0:
        z = s * (scale_log2 * (2.0 / SOFTCAP))  # 2 log2(e) z
        e = tl.exp2(-tl.abs(z))
        reciprocal = 1.0 / (1.0 + e)
        tangent = (1.0 - e) * reciprocal
        s = tl.where(z < 0.0, -tangent, tangent) * (SOFTCAP * LOG2_E)
        inner = 4.0 * e * reciprocal * reciprocal
    else:
        s = s * scale_log2
        inner = 1.0
    if ALIBI:
        s -= slope * tl.abs(row + (seq_k - seq_q) - column).to(tl.float32)
    return s, inner


@triton.jit
def kept(
    seed_ptr, stats, start_m, start_n, columns, threshold, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The dropout mask of one tile [M, N]: element (stats + row, column) of ``philox.keep_mask``."""
    row = stats + start_m + tl.arange(0, BLOCK_M)
    return keep_tile(tl.load(seed_ptr), row, columns, start_n, threshold, BLOCK_M, BLOCK_N)
