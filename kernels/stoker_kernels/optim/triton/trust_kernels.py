"""The kernels of trust ratios: LAMB and LARS need each tensor's norms before they can move it.

Two launches over the tensors, and between them ``scalar_kernels.reduce_kernel``, which adds the blocks'
partial sums in a fixed order and puts the ratio among the tensor's scalars. LAMB's direction is not stored
but made again from the moments: 16 bytes per parameter either way, and no memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.optim.triton.kernels import (
    ALPHA1,
    ALPHA2,
    CORRECTION1,
    CORRECTION2,
    EPS,
    L2,
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


@triton.jit(do_not_specialize=["first", "blocks"])
def norms_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, partial_ptr, blocks,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, PARAMETERS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """partial (1 + PARAMETERS, blocks): sums of squares of gradients and of parameters."""
    block, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED)
    g_ptr = address(row, 1, start, G_TYPE, ALIGNED)
    scale = 1.0
    if PARAMETERS:
        scale = tl.load(scalars_ptr + index * SCALARS + SCALE)
    g_squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    p_squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + lane, mask=lane < count, other=0.0).to(tl.float32) * scale
        g_squares += by_four(g, BLOCK)
        if PARAMETERS:
            p = tl.load(p_ptr + lane, mask=lane < count, other=0.0).to(tl.float32)
            p_squares += by_four(p, BLOCK)
    tl.store(partial_ptr + block, tl.sum(g_squares, 0))
    if PARAMETERS:
        tl.store(partial_ptr + blocks + block, tl.sum(p_squares, 0))


@triton.jit
def lamb_direction(p, m, v, l2, correction1, correction2, eps):
    return m * correction1 / (tl.sqrt(v) * correction2 + eps) + l2 * p


@triton.jit(do_not_specialize=["first", "blocks"])
def lamb_moments_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, partial_ptr, blocks,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    STORED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The moments after this step; partial (3, blocks): squares of gradient, parameter, direction.

    Without STORED nothing but the partials is written: a shard is measured.
    """
    block, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED)
    g_ptr = address(row, 1, start, G_TYPE, ALIGNED)
    m_ptr = address(row, 2, start, S_TYPE, ALIGNED)
    v_ptr = address(row, 3, start, S_TYPE, ALIGNED)
    s = scalars_ptr + index * SCALARS
    scale, l2, eps = tl.load(s + SCALE), tl.load(s + L2), tl.load(s + EPS)
    alpha1, alpha2 = tl.load(s + ALPHA1), tl.load(s + ALPHA2)
    correction1, correction2 = tl.load(s + CORRECTION1), tl.load(s + CORRECTION2)
    stored = to_store(s, count, ALIGNED)
    g_squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    p_squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    u_squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        mask = lane < count
        p = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + lane, mask=mask, other=0.0).to(tl.float32) * scale
        m = tl.load(m_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        m += alpha1 * (g - m)
        v += alpha2 * (g * g - v)
        if STORED:
            tl.store(m_ptr + lane, m.to(S_TYPE), mask=lane < stored)
            tl.store(v_ptr + lane, v.to(S_TYPE), mask=lane < stored)
        u = lamb_direction(p, m, v, l2, correction1, correction2, eps)
        g_squares += by_four(g, BLOCK)
        p_squares += by_four(p, BLOCK)
        u_squares += by_four(
            tl.where(mask, u, 0.0), BLOCK
        )  # with eps = 0 the lanes beyond are 0 / 0
    tl.store(partial_ptr + block, tl.sum(g_squares, 0))
    tl.store(partial_ptr + blocks + block, tl.sum(p_squares, 0))
    tl.store(partial_ptr + 2 * blocks + block, tl.sum(u_squares, 0))


@triton.jit(do_not_specialize=["first", "seed"])
def lamb_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, seed,
    P_TYPE: tl.constexpr, S_TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Move the parameters: STEP_SIZE is lr times the trust ratio by now."""
    _, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    s = scalars_ptr + index * SCALARS
    count = to_store(s, count, ALIGNED)
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED)
    m_ptr = address(row, 2, start, S_TYPE, ALIGNED)
    v_ptr = address(row, 3, start, S_TYPE, ALIGNED)
    l2, eps, step_size = tl.load(s + L2), tl.load(s + EPS), tl.load(s + STEP_SIZE)
    correction1, correction2 = tl.load(s + CORRECTION1), tl.load(s + CORRECTION2)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        mask = lane < count
        p = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        p -= step_size * lamb_direction(p, m, v, l2, correction1, correction2, eps)
        store_parameter(
            p_ptr + lane, p, mask, seed, row, tl.load(s + STEP), start + offset,
            P_TYPE, ROUNDED, BLOCK,
        )  # fmt: skip
