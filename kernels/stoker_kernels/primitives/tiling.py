"""Tile sizes of memory-bound kernels over a (rows, columns) array, and what an autotuner may try around them.

``row_tile``: programs that need whole rows (the norms, softmax's short rows). ``tile``: elementwise
programs, of which none needs a whole row (``ops/glu``, ``ops/bias_gelu``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from stoker_kernels.runtime.device import Device
    from stoker_kernels.tuning import Config


TILE_NBYTES = 4096  # of each tensor, in flight for one program; 32 per thread at 4 warps
MIN_RUN = 128  # columns: shorter runs waste memory transactions
WASTE = 16  # at most one lane in 16 idle behind the last column, where a tile allows that
ROW_TILE = 2048  # values that a program of whole rows holds at once: 16 per thread at 4 warps
MAX_ROW = 65536  # columns: no program can hold more
VALUES_PER_THREAD = 64  # of whole rows, at most, in a candidate


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. Triton's own takes 2 us of host time, a launch some 20."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the least power of two that is not below ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()


def column_block(columns: int, values: int) -> int:
    """Return the widest power of two, at most ``values``, whose blocks leave few lanes idle in a row."""
    widest = min(power_of_2(columns), values)
    block = widest
    while block >= MIN_RUN:
        if cdiv(columns, block) * block * WASTE <= columns * (WASTE + 1):
            return block
        block //= 2
    return widest


def tile(columns: int, dtype: torch.dtype, nbytes: int = TILE_NBYTES) -> Config:
    """Return BLOCK_M rows by BLOCK_N columns, ``nbytes`` in all, and a warp for each 1024 of them."""
    values = nbytes // dtype.itemsize
    block_n = column_block(columns, values)
    return {
        "BLOCK_M": max(1, values // block_n),
        "BLOCK_N": block_n,
        "num_warps": max(1, nbytes // 1024),
    }


def candidates(columns: int, dtype: torch.dtype) -> list[Config]:
    """Return what an autotuner may try: half, equal and double the size, by 4 and 8 warps."""
    return [
        {**tile(columns, dtype, nbytes), "num_warps": warps}
        for nbytes in (TILE_NBYTES // 2, TILE_NBYTES, TILE_NBYTES * 2)
        for warps in (4, 8)
    ]


def row_tile(columns: int, narrowest: int = 1) -> Config:
    """Return BLOCK_M whole rows of ``columns`` values, padded to at least ``narrowest``."""
    block_n = max(narrowest, power_of_2(columns))
    block_m = max(1, min(32, ROW_TILE // block_n))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": min(16, max(4, block_m * block_n // 512)),
    }


def check_row(op: str, columns: int) -> None:
    """Raise ``ValueError`` for rows that no program can hold.

    No register of the norms spills up to 8192 columns; beyond that part of a row lies in local memory.
    """
    if columns > MAX_ROW:
        raise ValueError(f"{op} takes at most {MAX_ROW} columns on the GPU, got {columns}")


def backward_row_tile(base: Config, warps_per_sm: int) -> Config:
    """Return ``base`` for programs that walk many rows: with STAGES and PROGRAMS of a multiprocessor.

    PROGRAMS are as many as ``warps_per_sm`` make: more than fit would begin when the others have ended,
    and run alone. With STAGES above 1 the next rows come through shared memory meanwhile.
    """
    return {**base, "STAGES": 1, "PROGRAMS": max(1, warps_per_sm // base["num_warps"])}


def partial_count(device: Device, rows: int, config: Config) -> int:
    """Return the number of such programs, each with a partial row of its sums."""
    limit = 3 if device.interpreted else config["PROGRAMS"] * device.multiprocessors
    return min(cdiv(rows, config["BLOCK_M"]), limit)


def row_candidates(base: Config, stages: Sequence[int]) -> list[Config]:
    """Return what an autotuner may try around ``base``: more or fewer rows and warps, and ``stages``.

    The latter only where ``base`` has STAGES, the loads that a loop over rows has in flight. Its PROGRAMS
    keep the number of warps.
    """
    of_loop = "STAGES" in base

    def loop(warps: int, count: int) -> Config:
        programs = base["PROGRAMS"] * base["num_warps"] // warps
        return {"STAGES": count, "PROGRAMS": max(1, programs)}

    return [
        {**base, "BLOCK_M": block_m, "num_warps": warps, **(loop(warps, count) if of_loop else {})}
        for block_m in sorted({max(1, base["BLOCK_M"] // 2), base["BLOCK_M"], base["BLOCK_M"] * 2})
        for warps in (4, 8, 16)
        for count in (stages if of_loop else (0,))
        if block_m * base["BLOCK_N"] // (32 * warps) <= VALUES_PER_THREAD
    ]
