"""RMSNorm on the GPU: one forward kernel, one backward kernel, no atomics.

A program holds BLOCK_M rows of N values. Backward programs walk many rows, keep their share of dw in
registers and write one partial row each; the partials are summed afterwards, so results repeat bit
for bit. Bytes moved (b per value): forward 2*T*N*b, backward 3*T*N*b plus PARTIALS*N*4.
Formulas: see ``reference``. bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels._runtime import dense_last_dim, is_interpreted, launch_guard

MAX_COLUMNS = 65536
TILE = 2048  # values a program holds at once: 16 per thread at 4 warps
MAX_PARTIALS = 512  # ~4 backward programs per SM of the largest GPUs


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, stride_x, rows, columns, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M] int64: T*N > 2^31
    column = tl.arange(0, BLOCK_N)  # [N]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)  # [M, N]
    w = tl.load(w_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)  # [M]
    y = x * rstd[:, None] * w[None, :]
    y_ptrs = y_ptr + row[:, None] * columns + column[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def rms_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_partial_ptr, stride_dy, stride_x, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)  # [N]
    w = tl.load(w_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_N], dtype=tl.float32)
    for block in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)  # [M]
        xhat = x.to(tl.float32) * rstd[:, None]  # [M, N]
        dy = dy.to(tl.float32)
        dw += tl.sum(dy * xhat, 0)
        dxhat = dy * w[None, :]
        mean = tl.sum(dxhat * xhat, 1) / columns  # [M]
        dx = (dxhat - xhat * mean[:, None]) * rstd[:, None]
        dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_partial_ptr + program.to(tl.int64) * columns + column, dw, mask=column < columns)


def tile(columns: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) for rows of ``columns`` values.

    No register spills up to 8192 columns; beyond that the backward keeps part of a row in local memory.
    """
    if columns > MAX_COLUMNS:
        raise ValueError(f"rms_norm takes at most {MAX_COLUMNS} columns on the GPU, got {columns}")
    block_n = triton.next_power_of_2(columns)
    block_m = max(1, min(32, TILE // block_n))
    warps = min(16, max(4, block_m * block_n // 512))
    return block_m, block_n, warps


def rms_norm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.rms_norm_fwd``."""
    columns = x.shape[-1]
    x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
    rows = x_rows.shape[0]
    y = x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if y.numel():
        block_m, block_n, warps = tile(columns)
        with launch_guard(rms_norm_fwd_kernel, x):
            rms_norm_fwd_kernel[(triton.cdiv(rows, block_m),)](
                x_rows, weight.contiguous(), y, rstd, x_rows.stride(0), rows, columns, eps,
                BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
            )  # fmt: skip
    return y, rstd


def rms_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.rms_norm_bwd``."""
    columns = x.shape[-1]
    x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
    dy_rows = dense_last_dim(dy.reshape(-1, columns))
    rows = x_rows.shape[0]
    dx = x.new_empty(x.shape)
    if not dx.numel():
        return dx, torch.zeros_like(weight)
    block_m, block_n, warps = tile(columns)
    limit = 3 if is_interpreted(rms_norm_bwd_kernel) else MAX_PARTIALS  # so that tests loop too
    programs = min(triton.cdiv(rows, block_m), limit)
    dw_partial = x.new_empty((programs, columns), dtype=torch.float32)
    with launch_guard(rms_norm_bwd_kernel, x):
        rms_norm_bwd_kernel[(programs,)](
            dy_rows, x_rows, weight.contiguous(), rstd.contiguous(), dx, dw_partial,
            dy_rows.stride(0), x_rows.stride(0), rows, columns,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
        )  # fmt: skip
    return dx, dw_partial.sum(0).to(weight.dtype)
