"""The update kernel of Adagrad, Adadelta and RMSprop, which divide by the root of accumulated squares.

As the kernels of :mod:`~stoker_kernels.optim.triton.kernels`: one launch, each value read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.optim.triton.kernels import (
    ADDED,
    EPS,
    L2,
    MOMENTUM,
    SCALARS,
    SCALE,
    STEP,
    STEP_SIZE,
    address,
    by_four,
    locate,
    store_parameter,
    to_store,
)
from stoker_kernels.optim.triton.scalar_kernels import ADADELTA, ADAGRAD


@triton.jit(do_not_specialize=["first", "seed"])
def square_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, square_ptr, seed,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    RULE: tl.constexpr, HAS_SECOND: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One step. The second state is Adadelta's accumulated deltas or RMSprop's momentum buffer."""
    block, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED, S_TYPE)
    g_ptr = address(row, 1, start, G_TYPE, ALIGNED, S_TYPE)
    v_ptr = address(row, 2, start, S_TYPE, ALIGNED)
    b_ptr = address(row, 3, start, S_TYPE, ALIGNED)
    s = scalars_ptr + index * SCALARS
    scale, l2, step_size = tl.load(s + SCALE), tl.load(s + L2), tl.load(s + STEP_SIZE)
    added, momentum, eps = tl.load(s + ADDED), tl.load(s + MOMENTUM), tl.load(s + EPS)
    stored = to_store(s, count, ALIGNED)
    squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        mask = lane < count
        write = lane < stored
        p = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + lane, mask=mask, other=0.0).to(tl.float32) * scale
        v = tl.load(v_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        squares += by_four(g, BLOCK)
        g += l2 * p
        if RULE == ADAGRAD:
            v += g * g
        else:
            v += added * (g * g - v)
        tl.store(v_ptr + lane, v.to(S_TYPE), mask=write)
        if RULE == ADADELTA:
            moved = tl.load(b_ptr + lane, mask=mask, other=0.0).to(tl.float32)
            g *= tl.sqrt(moved + eps) / tl.sqrt(v + eps)
            moved += added * (g * g - moved)
            tl.store(b_ptr + lane, moved.to(S_TYPE), mask=write)
        else:
            g /= tl.sqrt(v) + eps
            if HAS_SECOND:
                g += momentum * tl.load(b_ptr + lane, mask=mask, other=0.0).to(tl.float32)
                tl.store(b_ptr + lane, g.to(S_TYPE), mask=write)
        p -= step_size * g
        store_parameter(
            p_ptr + lane, p, write, seed, row, tl.load(s + STEP), start + offset,
            P_TYPE, ROUNDED, BLOCK,
        )  # fmt: skip
    tl.store(square_ptr + block, tl.sum(squares, 0))
