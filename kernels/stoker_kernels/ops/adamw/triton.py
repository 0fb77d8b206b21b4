"""AdamW on the GPU: one launch updates every tensor of a step (multi-tensor apply).

The kernel reads tensor addresses from a table instead of one launch per parameter, whose CPU cost
would exceed the GPU's work for small tensors. Bytes moved, all fp32: 28 per parameter (read p, g, m, v,
write p, m, v). The same pass emits each program's sum of squared gradients. Formulas: ``reference``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels._launch import launch

if TYPE_CHECKING:
    from stoker_kernels.ops.adamw.reference import Step

BLOCK = 2048
TABLE_COLUMNS = 6  # addresses of p, g, m, v; number of elements; index of the first block


@triton.jit
def adamw_kernel(
    table_ptr, tensor_of_block_ptr, square_sum_ptr,
    decay, step_size, alpha1, alpha2, correction, eps,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK elements of one tensor. Table rows: see TABLE_COLUMNS."""
    block = tl.program_id(0)
    entry = table_ptr + tl.load(tensor_of_block_ptr + block) * 6
    p_ptr = tl.load(entry + 0).to(tl.pointer_type(P_TYPE))
    g_ptr = tl.load(entry + 1).to(tl.pointer_type(G_TYPE))
    m_ptr = tl.load(entry + 2).to(tl.pointer_type(M_TYPE))
    v_ptr = tl.load(entry + 3).to(tl.pointer_type(M_TYPE))
    numel = tl.load(entry + 4)
    if ALIGNED:  # numbers from a table carry no divisibility; without it loads are 4 bytes wide
        p_ptr = tl.multiple_of(p_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
        numel = tl.multiple_of(numel, 8)
    start = (block - tl.load(entry + 5)) * BLOCK  # int64: a tensor may pass 2^31 elements
    lane = tl.arange(0, BLOCK)
    mask = lane < numel - start
    p_ptrs, g_ptrs = p_ptr + start + lane, g_ptr + start + lane
    m_ptrs, v_ptrs = m_ptr + start + lane, v_ptr + start + lane
    p = tl.load(p_ptrs, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptrs, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptrs, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
    # 1 - beta comes from the host: in fp32, 1 - 0.999 keeps only four digits.
    m = m + alpha1 * (g - m)
    v = v + alpha2 * (g * g - v)
    p = decay * p - step_size * m / (tl.sqrt(v) / correction + eps)
    tl.store(p_ptrs, p.to(P_TYPE), mask=mask)
    tl.store(m_ptrs, m.to(M_TYPE), mask=mask)
    tl.store(v_ptrs, v.to(M_TYPE), mask=mask)
    tl.store(square_sum_ptr + block, tl.sum(g * g, 0))


TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def adamw(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    s: Step,
) -> torch.Tensor:
    """Update tensors of one device and one dtype signature in place; return sum(g^2), fp32 scalar.

    Strided gradients are copied first; parameters and moments must be contiguous. Tensors that allow
    16-byte loads share one launch, the others (odd views, odd sizes) a second.
    """
    grads = [g.contiguous() for g in grads]
    rows: dict[bool, list[list[int]]] = {True: [], False: []}
    for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        addresses, numel = [t.data_ptr() for t in tensors], tensors[0].numel()
        if numel:
            rows[numel % 8 == 0 and all(a % 16 == 0 for a in addresses)].append([*addresses, numel])
    total = torch.zeros((), dtype=torch.float32, device=params[0].device)
    types = [TRITON_TYPES[tensors[0].dtype] for tensors in (params, grads, exp_avgs)]
    for aligned, group in rows.items():
        if group:
            total += _launch(group, aligned, types, params[0], s)
    return total


def _launch(
    rows: list[list[int]], aligned: bool, types: list[tl.dtype], on: torch.Tensor, s: Step
) -> torch.Tensor:
    """One launch over table ``rows`` (without their last column); returns its sum(g^2)."""
    device = on.device
    counts = [triton.cdiv(row[4], BLOCK) for row in rows]
    firsts = [0, *accumulate(counts)]
    table = torch.tensor(
        [[*row, first] for row, first in zip(rows, firsts[:-1], strict=True)], dtype=torch.int64
    ).to(device)
    tensor_of_block = torch.repeat_interleave(
        torch.arange(len(rows), device=device),
        torch.tensor(counts).to(device),
        output_size=firsts[-1],  # known here: no wait for the device
    )
    partial = torch.empty(firsts[-1], dtype=torch.float32, device=device)
    launch(
        adamw_kernel, (firsts[-1],), table, tensor_of_block, partial,
        s.decay, s.step_size, 1.0 - s.beta1, 1.0 - s.beta2, s.correction, s.eps,
        P_TYPE=types[0], G_TYPE=types[1], M_TYPE=types[2], ALIGNED=aligned,
        BLOCK=BLOCK, num_warps=8, on=on,
    )  # fmt: skip
    return partial.sum()
