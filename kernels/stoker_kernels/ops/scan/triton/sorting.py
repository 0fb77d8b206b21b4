"""A stable radix sort on the GPU, 4 bits a pass, from the lowest: count, sum up, move.

Each tile counts its digits; the prefix sum over (digit, tile) is where a tile's keys of that digit begin; and
a tile moves its keys there in their order. Rows are sorted independently. Keys are the values as unsigned
integers of the same order; the values themselves are gathered once, by index, at the end. Satish, Harris and
Garland 2009, "Designing efficient sorting algorithms for manycore GPUs".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.scan.triton.sums import prefix_sum
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch

DIGITS = tl.constexpr(16)
DIGIT_BITS = 4
TILE = 512
KEY_TILE = 2048


@triton.jit
def sort_keys_kernel(
    x_ptr, keys_ptr, n, BITS: tl.constexpr, SIGNED: tl.constexpr, DESCENDING: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Map values to unsigned integers of BITS bits that order as they do; NaN above all, -0.0 as 0.0."""
    SIGN: tl.constexpr = -(1 << (BITS - 1))
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + place, mask=place < n, other=0)
    if x_ptr.dtype.element_ty.is_floating():
        wide = x.to(tl.float32)
        nan = wide != wide
        wide = tl.where(wide == 0, 0.0, wide)
        if x_ptr.dtype.element_ty == tl.float16:
            bits = wide.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        else:  # bf16 is the upper half
            bits = wide.to(tl.int32, bitcast=True) >> (32 - BITS)
        # A negative number's bits fall as it rises. Bits above BITS are not looked at.
        key = tl.where(bits < 0, ~bits, bits ^ SIGN)
        key = tl.where(nan, -1, key)
    else:
        key = x.to(tl.int32)
        if SIGNED:
            key = key ^ SIGN
    if DESCENDING:
        key = ~key
    tl.store(keys_ptr + place, key, mask=place < n)


@triton.jit
def _digits_of(keys_ptr, n, tiles, shift, TILE: tl.constexpr):
    """Return the keys of this program's tile, their digits, their offsets and which there are."""
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * TILE
    place = tl.arange(0, TILE)
    inside = place < n - first
    start = row.to(tl.int64) * n + first
    keys = tl.load(keys_ptr + start + place, mask=inside, other=0)
    return keys, (keys >> shift) & (DIGITS - 1), start + place, inside


@triton.jit
def sort_count_kernel(keys_ptr, counts_ptr, n, tiles, shift, TILE: tl.constexpr):
    """Count the digits of a tile: counts (rows, digits, tiles)."""
    _, digits, _, inside = _digits_of(keys_ptr, n, tiles, shift, TILE)
    digit = tl.arange(0, DIGITS)
    ours = (digits[:, None] == digit[None, :]) & inside[:, None]
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    counts = counts_ptr + row.to(tl.int64) * DIGITS * tiles + digit * tiles + tile
    tl.store(counts, tl.sum(ours.to(tl.int32), 0))


@triton.jit
def sort_move_kernel(
    keys_ptr, indices_ptr, ends_ptr, counts_ptr, new_keys_ptr, new_indices_ptr, n, tiles, shift,
    FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move a tile's keys and indices behind those of lower digits, and of the same in earlier tiles."""
    keys, digits, place, inside = _digits_of(keys_ptr, n, tiles, shift, TILE)
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    digit = tl.arange(0, DIGITS)
    ours = ((digits[:, None] == digit[None, :]) & inside[:, None]).to(tl.int32)
    rank = tl.sum(tl.cumsum(ours, 0) * ours, 1) - 1  # among the tile's keys of that digit
    at = row.to(tl.int64) * DIGITS * tiles + digits * tiles + tile
    begin = tl.load(ends_ptr + at, mask=inside, other=0) - tl.load(
        counts_ptr + at, mask=inside, other=0
    )
    base = row.to(tl.int64) * n
    if FIRST:  # noqa: SIM108
        indices = (place - base).to(tl.int32)
    else:
        indices = tl.load(indices_ptr + place, mask=inside, other=0)
    to = base + begin + rank
    if not LAST:
        tl.store(new_keys_ptr + to, keys, mask=inside)
    tl.store(new_indices_ptr + to, indices.to(new_indices_ptr.dtype.element_ty), mask=inside)


def sort_indices(x: torch.Tensor, bits: int, descending: bool) -> torch.Tensor:
    """Compute ``reference.sort_indices`` of contiguous x (rows, n), whose values have ``bits`` bits."""
    rows, n = x.shape
    keys, other_keys, indices, other_indices = x.new_empty((4, rows, n), dtype=torch.int32)
    out = x.new_empty((rows, n), dtype=torch.int64)
    launch(
        sort_keys_kernel, (cdiv(rows * n, KEY_TILE),), x, keys, rows * n,
        BITS=bits, SIGNED=x.dtype.is_signed, DESCENDING=descending, on=x, TILE=KEY_TILE, num_warps=4,
    )  # fmt: skip
    tiles = cdiv(n, TILE)
    counts, ends = x.new_empty((2, rows, DIGITS.value * tiles), dtype=torch.int32)
    for shift in range(0, bits, DIGIT_BITS):
        last = shift + DIGIT_BITS >= bits
        config = {"TILE": TILE, "num_warps": 4}
        launch(sort_count_kernel, (rows * tiles,), keys, counts, n, tiles, shift, on=x, **config)
        prefix_sum(counts, ends, reverse=False)
        launch(
            sort_move_kernel, (rows * tiles,), keys, indices, ends, counts, other_keys,
            out if last else other_indices, n, tiles, shift,
            FIRST=shift == 0, LAST=last, on=x, **config,
        )  # fmt: skip
        keys, other_keys = other_keys, keys
        indices, other_indices = other_indices, indices
    return out
