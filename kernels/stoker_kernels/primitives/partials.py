"""The second stage of sums over rows: programs left one partial row each, here they become one row.

Used where a backward pass sums a weight's gradient without atomics (the norms, ``ops/bias_gelu``). The
order of summation depends on the sizes alone, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch

if TYPE_CHECKING:
    import torch

BLOCK_P = 64  # partials in flight at once, 128 bytes of each
BLOCK_N = 32
WARPS = 4


@triton.jit(do_not_specialize=["partials"])
def sum_partials_kernel(
    partial_ptr, first_ptr, second_ptr, partials, columns,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, kind): the sum of partial[kind, :, columns], to first or second."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    kind = tl.program_id(1)
    partial_ptr += tl.cast(kind, tl.int64) * partials * columns
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, partials, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)  # [P]
        mask = (row < partials)[:, None] & (column < columns)[None, :]
        ptrs = partial_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(ptrs, mask=mask, other=0.0)
    out = tl.sum(total, 0).to(first_ptr.dtype.element_ty)
    if kind == 0:
        tl.store(first_ptr + column, out, mask=column < columns)
    else:
        tl.store(second_ptr + column, out, mask=column < columns)


def sum_partials(partial: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sum partial (K, P, N) fp32 over P, in fp32, and round once -> K rows (N,) of ``dtype``; K is 1 or 2.

    One launch, and rows of their own: an op must not return two views of one tensor.
    """
    kinds, partials, columns = partial.shape
    rows = [partial.new_empty(columns, dtype=dtype) for _ in range(kinds)]
    launch(
        sum_partials_kernel, (cdiv(columns, BLOCK_N), kinds),
        partial, rows[0], rows[-1], partials, columns,
        BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N, num_warps=WARPS, on=partial,
    )  # fmt: skip
    return rows
