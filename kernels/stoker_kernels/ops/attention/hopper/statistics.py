"""The numbers that Hopper's backward kernel reads of each row: base-2 log-sum-exp, and delta.

A kernel of its own, as in FlashAttention-2: the rows of a head lie in whole tiles, so that TMA can load them.
Run by ``launchers``, before ``backward``.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["seq_q", "padded_rows", "all_rows"])
def hopper_statistics_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, stats_ptr, stride_gb, stride_gh, stride_gs, stride_ob,
    stride_oh, stride_os, heads, seq_q, padded_rows, all_rows,
    HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M of one head's rows. delta = sum(dout * out) - dlse; stats (2, all_rows).

    A row that saw nothing, or lies behind the last, has the log-sum-exp +inf and delta 0: it adds nothing.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.cast(tl.program_id(1), tl.int64)
    batch = tl.cast(tl.program_id(2), tl.int64)
    there = row < seq_q
    column = tl.arange(0, HEAD_DIM)[None, :]
    rows = row.to(tl.int64)[:, None]
    g = tl.load(
        dout_ptr + batch * stride_gb + head * stride_gh + rows * stride_gs + column,
        mask=there[:, None], other=0.0,
    )  # fmt: skip
    o = tl.load(
        out_ptr + batch * stride_ob + head * stride_oh + rows * stride_os + column,
        mask=there[:, None], other=0.0,
    )  # fmt: skip
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    place = batch * heads + head
    lse = tl.load(lse_ptr + place * seq_q + row, mask=there, other=-float("inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place * seq_q + row, mask=there, other=0.0)
    saw = lse != -float("inf")
    to = stats_ptr + place * padded_rows + row
    tl.store(to, tl.where(saw, lse * LOG2_E, float("inf")), mask=row < padded_rows)
    tl.store(to + all_rows, tl.where(saw, delta, 0.0), mask=row < padded_rows)
