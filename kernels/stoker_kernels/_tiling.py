"""Tiles of an elementwise kernel over a (rows, columns) array: no program needs a whole row.

Used by the launchers of ``ops/glu`` and ``ops/bias_gelu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

if TYPE_CHECKING:
    import torch

    from stoker_kernels.tuning import Config


TILE_NBYTES = 4096  # of each tensor, in flight for one program; 32 per thread at 4 warps
MIN_RUN = 128  # columns: shorter runs waste memory transactions
WASTE = 16  # at most one lane in 16 idle behind the last column, where a tile allows that


def column_block(columns: int, values: int) -> int:
    """The widest power of two, at most ``values``, whose blocks leave few lanes idle in a row."""
    widest = min(triton.next_power_of_2(columns), values)
    block = widest
    while block >= MIN_RUN:
        if triton.cdiv(columns, block) * block * WASTE <= columns * (WASTE + 1):
            return block
        block //= 2
    return widest


def tile(columns: int, dtype: torch.dtype, nbytes: int = TILE_NBYTES) -> Config:
    """BLOCK_M rows by BLOCK_N columns, ``nbytes`` in all, and a warp for each 1024 of them."""
    values = nbytes // dtype.itemsize
    block_n = column_block(columns, values)
    return {
        "BLOCK_M": max(1, values // block_n),
        "BLOCK_N": block_n,
        "num_warps": max(1, nbytes // 1024),
    }


def candidates(columns: int, dtype: torch.dtype) -> list[Config]:
    """What an autotuner may try: half, equal and double the size, by 4 and 8 warps."""
    return [
        {**tile(columns, dtype, nbytes), "num_warps": warps}
        for nbytes in (TILE_NBYTES // 2, TILE_NBYTES, TILE_NBYTES * 2)
        for warps in (4, 8)
    ]
