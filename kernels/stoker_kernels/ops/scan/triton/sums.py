"""Prefix sums on the GPU: the sum of each tile, the sums before each tile, and the sums within it.

Three launches, or one where a row is one tile. No program waits for another and none adds atomically, so the
order of additions, and every bit, is the same each time. Bytes moved: two reads and a write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.tiling import cdiv, power_of_2
from stoker_kernels.runtime.launch import launch

TILE = 2048
JOINED = 1024  # tiles whose sums one step of the second pass takes


@triton.jit
def _tile_of(x_ptr, n, tiles, TILE: tl.constexpr, SUM: tl.constexpr):
    """Return the values of this program's tile, where they lie, and which there are."""
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * TILE
    place = tl.arange(0, TILE)
    inside = place < n - first
    start = row.to(tl.int64) * n + first
    return tl.load(x_ptr + start + place, mask=inside, other=0).to(SUM), start + place, inside


@triton.jit
def scan_tiles_kernel(x_ptr, sums_ptr, n, tiles, SUM: tl.constexpr, TILE: tl.constexpr):
    x, _, _ = _tile_of(x_ptr, n, tiles, TILE, SUM)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x, 0))


@triton.jit
def scan_join_kernel(sums_ptr, before_ptr, tiles, REVERSE: tl.constexpr, JOINED: tl.constexpr):
    """Write for each tile of this program's row the sum of all tiles before it."""
    base = tl.program_id(0).to(tl.int64) * tiles
    place = tl.arange(0, JOINED)
    total = tl.zeros([], dtype=sums_ptr.dtype.element_ty)
    edge = tiles - 1 if REVERSE else 0
    tl.store(before_ptr + base + edge, total)
    for step in range(tl.cdiv(tiles, JOINED)):
        index = step * JOINED + place  # in the order of summation
        at = tiles - 1 - index if REVERSE else index
        sums = tl.load(sums_ptr + base + at, mask=index < tiles, other=0)
        until = tl.cumsum(sums, 0) + total
        following = at - 1 if REVERSE else at + 1
        tl.store(before_ptr + base + following, until, mask=index + 1 < tiles)
        total += tl.sum(sums, 0)


@triton.jit
def scan_within_kernel(
    x_ptr, before_ptr, y_ptr, n, tiles, SUM: tl.constexpr, REVERSE: tl.constexpr,
    ALONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    x, place, inside = _tile_of(x_ptr, n, tiles, TILE, SUM)
    y = tl.cumsum(x, 0, reverse=REVERSE)
    if not ALONE:
        y += tl.load(before_ptr + tl.program_id(0))
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


def prefix_sum(x: torch.Tensor, out: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Compute ``reference.prefix_sum`` of contiguous x (rows, n) into ``out``, of any integers' width."""
    rows, n = x.shape
    dtype = torch.float32 if x.is_floating_point() else out.dtype
    kind = {torch.float32: tl.float32, torch.int32: tl.int32, torch.int64: tl.int64}[dtype]
    tile = min(TILE, max(128, power_of_2(max(n, 1))))
    tiles = cdiv(n, tile)
    config = {"TILE": tile, "num_warps": max(1, tile // 512)}
    before = out
    if tiles > 1:
        sums, before = x.new_empty((2, rows, tiles), dtype=dtype)
        launch(scan_tiles_kernel, (rows * tiles,), x, sums, n, tiles, SUM=kind, on=x, **config)
        launch(
            scan_join_kernel, (rows,), sums, before, tiles,
            REVERSE=reverse, JOINED=JOINED, on=x, num_warps=4,
        )  # fmt: skip
    launch(
        scan_within_kernel, (rows * tiles,), x, before, out, n, tiles,
        SUM=kind, REVERSE=reverse, ALONE=tiles <= 1, on=x, **config,
    )  # fmt: skip
    return out
