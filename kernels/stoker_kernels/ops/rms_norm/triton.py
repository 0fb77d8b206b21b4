"""RMSNorm on the GPU: one forward kernel, one backward kernel, no atomics.

A program holds BLOCK_M rows of N values. Backward programs walk many rows, keep their share of dw in
registers and write one partial row each; the partials are summed afterwards, so results repeat bit
for bit. Bytes moved (b per value): forward 2*T*N*b, backward 3*T*N*b plus PARTIALS*N*4; with the
residual 4*T*N*b each. Formulas: see ``reference``. bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.partials import sum_partials
from stoker_kernels.primitives.tiling import (
    backward_row_tile,
    cdiv,
    check_row,
    partial_count,
    row_candidates,
    row_tile,
)
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

STAGES = (1, 2, 3)  # of the backward, to try
WARPS_PER_SM = 24  # backward: as many as registers hold; more would begin when these have ended


@triton.jit(do_not_specialize=["rows"])
def rms_norm_fwd_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rstd_ptr, stride_x, stride_residual, rows, columns, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M] int64: T*N > 2^31
    column = tl.arange(0, BLOCK_N)  # [N]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    out = row[:, None] * columns + column[None, :]  # [M, N]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)  # [M, N]
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row[:, None] * stride_residual + column[None, :]
        x += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + out, h, mask=mask)
        x = h.to(tl.float32)  # the norm is of what the backward will read
    w = 1.0
    if HAS_WEIGHT:  # asked for before the sum is waited for
        w = tl.load(w_ptr + column, mask=column < columns, other=0.0).to(tl.float32) + OFFSET
        w = w[None, :]
    rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)  # [M]
    y = x * rstd[:, None] * w
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, dw_partial_ptr, stride_dy, stride_dh, stride_h,
    rows, columns,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Waiting for the sum, 16-bit values take few registers; fp32 ones would cost a program.
    EARLY: tl.constexpr = dh_ptr.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)  # [N]
    dw = tl.zeros([BLOCK_N], dtype=tl.float32)
    blocks = tl.cdiv(rows, BLOCK_M)
    for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        h = tl.load(h_ptr + row[:, None] * stride_h + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0)
        dh_ptrs = dh_ptr + row[:, None] * stride_dh + column[None, :]
        dh = dy
        if HAS_RESIDUAL and EARLY:
            dh = tl.load(dh_ptrs, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)  # [M]
        hhat = h.to(tl.float32) * rstd[:, None]  # [M, N]
        dy = dy.to(tl.float32)
        dhhat = dy
        if HAS_WEIGHT:
            dw += tl.sum(dy * hhat, 0)
            # From the cache every time: held in registers it would cost a program per multiprocessor.
            w = tl.load(w_ptr + column, mask=column < columns, other=0.0)
            dhhat = dy * (w.to(tl.float32) + OFFSET)[None, :]
        mean = tl.sum(dhhat * hhat, 1) / columns  # [M]
        dx = (dhhat - hhat * mean[:, None]) * rstd[:, None]
        if HAS_RESIDUAL:
            if not EARLY:
                dh = tl.load(dh_ptrs, mask=mask, other=0.0)
            dx += dh.to(tl.float32)
        dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        dw_partial_ptr += program.to(tl.int64) * columns
        tl.store(dw_partial_ptr + column, dw, mask=column < columns)


def tile(columns: int) -> Config:
    """Return the heuristic of the forward: rows of ``columns`` values. Raises ``ValueError`` for too many."""
    check_row("rms_norm", columns)
    return row_tile(columns)


def backward_tile(columns: int, dtype: torch.dtype) -> Config:
    """Return :func:`tile` for programs that walk many rows.

    Of 8192 narrow values two programs with half the warps fit a multiprocessor, where one fits else.
    """
    base = tile(columns)
    if base["BLOCK_N"] == 8192 and dtype.itemsize == 2:
        return {**base, "num_warps": 8, "STAGES": 1, "PROGRAMS": 2}
    return backward_row_tile(base, WARPS_PER_SM)


def config_for(kernel: str, base: Config, columns: int, dtype: torch.dtype) -> Config:
    """Return the tuned configuration, or ``base``."""
    return choose(kernel, base, lambda: row_candidates(base, STAGES), columns=columns, dtype=dtype)


def rms_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, h, rstd, as ``reference.rms_norm_fwd``."""
    columns = x.shape[-1]
    x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
    rows = x_rows.shape[0]
    y, rstd = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    h = x.new_empty(0 if residual is None else x.shape)
    r_rows = x_rows if residual is None else dense_last_dim(residual.reshape(-1, columns))
    if y.numel():
        config = config_for("rms_norm_fwd", tile(columns), columns, x.dtype)
        launch(
            rms_norm_fwd_kernel, (cdiv(rows, config["BLOCK_M"]),),
            x_rows, r_rows, x_rows if weight is None else weight.contiguous(), y, h, rstd,
            x_rows.stride(0), r_rows.stride(0), rows, columns, eps,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, OFFSET=offset,
            on=x, **config,
        )  # fmt: skip
    return y, h, rstd


def rms_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, dw, as ``reference.rms_norm_bwd``."""
    columns = h.shape[-1]
    h_rows = dense_last_dim(h.reshape(-1, columns))  # [T, N]
    dy_rows = dense_last_dim(dy.reshape(-1, columns))
    dh_rows = dy_rows if dh is None else dense_last_dim(dh.reshape(-1, columns))
    rows = h_rows.shape[0]
    dx = h.new_empty(h.shape)
    if not dx.numel():
        return dx, h.new_empty(0) if weight is None else torch.zeros_like(weight)
    config = config_for("rms_norm_bwd", backward_tile(columns, h.dtype), columns, h.dtype)
    programs = partial_count(device_of(rms_norm_bwd_kernel, h), rows, config)
    config = {name: value for name, value in config.items() if name != "PROGRAMS"}
    partial = h.new_empty((0 if weight is None else 1, programs, columns), dtype=torch.float32)
    launch(
        rms_norm_bwd_kernel, (programs,),
        dy_rows, dh_rows, h_rows, h_rows if weight is None else weight.contiguous(),
        rstd.contiguous(), dx, partial,
        dy_rows.stride(0), dh_rows.stride(0), h_rows.stride(0), rows, columns,
        HAS_RESIDUAL=dh is not None, HAS_WEIGHT=weight is not None, OFFSET=offset, on=h, **config,
    )  # fmt: skip
    if weight is None:
        return dx, h.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)[0]
