"""Dropout inside a kernel: the mask of a tile, drawn from a seed and the elements' places.

The same mask as ``philox.keep_mask`` for the same seed and threshold, whatever the tile's size. Philox
makes four numbers at a time and all four are used: one alone would bound a memory-bound kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_tile(
    seed, row, columns, start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """row [M] int64; columns start .. start + N, both multiples of 4 -> [M, N] of 0/1 (int1).

    ``columns`` is the width of the whole row, which numbers the elements.
    """
    quad = start // 4 + tl.arange(0, BLOCK_N // 4)  # [N / 4]
    counter = row[:, None] * tl.cdiv(columns, 4) + quad[None, :]  # [M, N / 4] int64
    a, b, c, d = tl.randint4x(seed, counter)
    bits = tl.join(tl.join(a, c), tl.join(b, d))  # [M, N / 4, 2, 2], last two in the order a b c d
    bits = tl.reshape(bits, [BLOCK_M, BLOCK_N]).to(tl.uint32, bitcast=True)
    return (bits >> 8) >= threshold.to(tl.uint32)


@triton.jit
def keep_mask_kernel(
    seed_ptr, out_ptr, rows, columns, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out (rows, columns) int32: 1 where ``philox.keep_mask`` keeps. For tests; one program."""
    row = tl.arange(0, BLOCK_M).to(tl.int64)
    for start in range(0, columns, BLOCK_N):
        keep = keep_tile(tl.load(seed_ptr), row, columns, start, threshold, BLOCK_M, BLOCK_N)
        column = start + tl.arange(0, BLOCK_N)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out_ptr + row[:, None] * columns + column[None, :], keep.to(tl.int32), mask=mask)
