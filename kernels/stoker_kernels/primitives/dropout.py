"""Dropout inside a kernel: the mask of a tile, drawn from a seed and the elements' places.

The same mask as ``philox.keep_mask`` for the same seed and threshold, whatever the tile's size. Philox
makes four numbers of 32 bits at a time, and each half of one decides over one element: more bits for each
would bound a memory-bound kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(a, factor: tl.constexpr, WIDE: tl.constexpr):
    """Return the high and the low half of a product of uint32; WIDE: by one instruction instead of two."""
    if not WIDE:
        return tl.umulhi(a, tl.full([1], factor, tl.uint32)), a * factor
    both = a.to(tl.uint64) * factor
    return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def _philox(seed, counter, WIDE: tl.constexpr):
    """Map counter int64 -> four tensors of uint32, as ``philox.philox4x32``."""
    a, b = counter.to(tl.uint32), (counter.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    key_a = seed.to(tl.uint32)
    key_b = (seed.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    for _ in tl.static_range(7):  # philox.ROUNDS
        first_high, first_low = _product(a, 0xD2511F53, WIDE)
        second_high, second_low = _product(c, 0xCD9E8D57, WIDE)
        a, b, c, d = second_high ^ b ^ key_a, second_low, first_high ^ d ^ key_b, first_low
        key_a += 0x9E3779B9
        key_b += 0xBB67AE85
    return a, b, c, d


@triton.jit
def keep_tile(
    seed, row, columns, start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr = False,
):  # fmt: skip
    """row [M] int64; columns start .. start + N, both multiples of 8 -> [M, N] of 0/1 (int1).

    ``columns`` is the width of the whole row, which numbers the elements. ``threshold`` is below 2^16: where
    nothing is kept, the factor of what is must be 0. WIDE takes fewer instructions and pairs of registers:
    not where a kernel, as attention's backward, has none left.
    """
    octet = start // 8 + tl.arange(0, BLOCK_N // 8)  # [N / 8]
    counter = row[:, None] * tl.cdiv(columns, 8) + octet[None, :]  # [M, N / 8] int64
    a, b, c, d = _philox(seed, counter, WIDE)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [M, N / 8, 2, 2], last two in the order a b c d
    # The upper half decides whatever the lower is: it need not be moved down.
    bits = tl.join(words << 16, words)  # [M, N / 8, 2, 2, 2]
    return tl.reshape(bits, [BLOCK_M, BLOCK_N]) >= (threshold.to(tl.uint32) << 16)


@triton.jit
def keep_mask_kernel(
    seed_ptr, out_ptr, rows, columns, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """out (rows, columns) int32: 1 where ``philox.keep_mask`` keeps. For tests; one program."""
    row = tl.arange(0, BLOCK_M).to(tl.int64)
    for start in range(0, columns, BLOCK_N):
        seed = tl.load(seed_ptr)
        keep = keep_tile(seed, row, columns, start, threshold, BLOCK_M, BLOCK_N, WIDE)
        column = start + tl.arange(0, BLOCK_N)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out_ptr + row[:, None] * columns + column[None, :], keep.to(tl.int32), mask=mask)
