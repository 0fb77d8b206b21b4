"""The bias of attention's scores inside the kernels: where a head's begins, and a tile of it.

BIAS says which: 1, a tensor of every row and column; 2, T5's, one number for each clipped distance
column - row, computed from the table before the launch, in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.ops.attention.triton.tiles import LOG2_E

DENSE = 1
RELATIVE = 2


@triton.jit
def bias_base(bias_ptr, batch, head, heads, stride_b, stride_h, reach, BIAS: tl.constexpr):
    """Address of a head's bias; by distance, that of distance 0. A pipeline runs ahead of the last head."""
    base = bias_ptr
    if BIAS == 1:
        head = tl.minimum(head, heads - 1)
        base += tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    elif BIAS == 2:
        base += tl.minimum(head, heads - 1) * (2 * reach + 1) + reach
    return base


@triton.jit
def clipped(row, column, seq_q, seq_k, reach):
    """The distances column - row of a tile, within -reach .. reach; both broadcast."""
    return tl.minimum(tl.maximum(column - row - (seq_k - seq_q), -reach), reach)


@triton.jit
def bias_tile(
    base, stride_m, start_m, start_n, row, column, seq_q, seq_k, reach, BIAS: tl.constexpr
):  # fmt: skip
    """The base-2 bias of the scores (start_m + row, start_n + column), which broadcast; 0 outside."""
    if BIAS == 1:
        # The tile's start is int64; inside a tile int32 is enough.
        base += tl.cast(start_m, tl.int64) * stride_m + start_n
        inside = (row < seq_q - start_m) & (column < seq_k - start_n)
        found = tl.load(base + row * stride_m + column, mask=inside, other=0.0)
        found = found.to(tl.float32) * LOG2_E
    else:
        found = tl.load(base + clipped(start_m + row, start_n + column, seq_q, seq_k, reach))
    return found
