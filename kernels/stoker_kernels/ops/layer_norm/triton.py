"""LayerNorm with dropout and a residual sum on the GPU: one forward and one backward kernel, no atomics.

A program holds BLOCK_M rows of N values. Backward programs walk many rows, keep their share of dw and
db in registers and write one partial row of each; the partials are summed afterwards, so results
repeat bit for bit. The dropout mask costs no memory: both passes draw it from the seed. Bytes moved
(b per value, T rows): plain 2*T*N*b forward, 3*T*N*b backward; with the residual 4*T*N*b each, and
5*T*N*b backward when dropout tells dx from dresidual; the backward adds 16*PARTIALS*N. Formulas: see
``reference``. bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.dropout import keep_tile
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

if TYPE_CHECKING:
    from stoker_kernels.ops.layer_norm.reference import Four, Options

STAGES = (1, 2)  # of the backward, to try
WARPS_PER_SM = 20  # backward: as many as registers hold; more would only write more partials


@triton.jit(do_not_specialize=["rows", "threshold"])
def layer_norm_fwd_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, seed_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    stride_x, stride_residual, rows, columns, eps, threshold, keep_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M] int64: T*N > 2^31
    column = tl.arange(0, BLOCK_N)  # [N]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    out = row[:, None] * columns + column[None, :]  # [M, N]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)  # [M, N]
    if DROPOUT:
        keep = keep_tile(tl.load(seed_ptr), row, columns, 0, threshold, BLOCK_M, BLOCK_N, True)
        h = tl.where(keep, h, 0.0) * keep_scale
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row[:, None] * stride_residual + column[None, :]
        h += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL or DROPOUT:
        stored = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + out, stored, mask=mask)
        h = stored.to(tl.float32)  # the norm is of what the backward will read
    mean = tl.sum(h, 1) / columns  # [M]
    centred = tl.where((column < columns)[None, :], h - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / columns + eps)  # [M]
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        w = tl.load(w_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y *= (w + OFFSET)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _two_sums(a, b):  # fmt: skip
    """a, b [M, N] -> the sum of each over N, [M]: together they wait at the same barriers."""
    return tl.split(tl.sum(tl.join(a, b), 1))


@triton.jit(do_not_specialize=["rows", "threshold"])
def layer_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, seed_ptr, dx_ptr, dresidual_ptr, partial_ptr,
    stride_dy, stride_dh, stride_h, rows, columns, threshold, keep_scale,
    HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    TWO_STORES: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Waiting for the sums, 16-bit values take few registers; fp32 ones would spill.
    EARLY: tl.constexpr = dh_ptr.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)  # [N]
    dw = tl.zeros([BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_N], dtype=tl.float32)
    blocks = tl.cdiv(rows, BLOCK_M)
    for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        h = tl.load(h_ptr + row[:, None] * stride_h + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0)
        dh_ptrs = dh_ptr + row[:, None] * stride_dh + column[None, :]
        dh = dy
        if HAS_DH and EARLY:
            dh = tl.load(dh_ptrs, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)  # [M]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        hhat = (h.to(tl.float32) - mean[:, None]) * rstd[:, None]  # [M, N]; past N, dy is 0
        dy = dy.to(tl.float32)
        if HAS_BIAS:
            db += tl.sum(dy, 0)
        grad = dy
        if HAS_WEIGHT:
            dw += tl.sum(dy * hhat, 0)
            # From the cache every time: held in registers it would cost a program per multiprocessor.
            w = tl.load(w_ptr + column, mask=column < columns, other=0.0)
            grad = dy * (w.to(tl.float32) + OFFSET)[None, :]
        product, total = _two_sums(grad * hhat, grad)  # [M]
        mean_of_product, mean_of_grad = product / columns, total / columns
        grad = (grad - hhat * mean_of_product[:, None] - mean_of_grad[:, None]) * rstd[:, None]
        if HAS_DH:
            if not EARLY:
                dh = tl.load(dh_ptrs, mask=mask, other=0.0)
            grad += dh.to(tl.float32)
        out = row[:, None] * columns + column[None, :]
        if TWO_STORES:
            dresidual = grad.to(dresidual_ptr.dtype.element_ty)
            tl.store(dresidual_ptr + out, dresidual, mask=mask)
        if DROPOUT:
            keep = keep_tile(tl.load(seed_ptr), row, columns, 0, threshold, BLOCK_M, BLOCK_N, True)
            grad = tl.where(keep, grad, 0.0) * keep_scale
        tl.store(dx_ptr + out, grad.to(dx_ptr.dtype.element_ty), mask=mask)
    partial = partial_ptr + program.to(tl.int64) * columns + column
    if HAS_WEIGHT:
        tl.store(partial, dw, mask=column < columns)
    if HAS_BIAS:
        db_partial = partial + tl.num_programs(0).to(tl.int64) * columns
        tl.store(db_partial, db, mask=column < columns)


def tile(columns: int) -> Config:
    """Return the heuristic of the forward: rows of ``columns`` values. Raises ``ValueError`` for too many."""
    check_row("layer_norm", columns)
    return row_tile(columns, narrowest=16)


def forward_tile(columns: int, dtype: torch.dtype, plain: bool) -> Config:
    """Return :func:`tile`; with half the warps where one narrow row is all that a program has to wait for.

    Or where it computes more than it waits (dropout): then what a thread does once is for twice the values.
    """
    base = tile(columns)
    if plain and base["BLOCK_N"] == 4096 and dtype.itemsize == 2:
        return {**base, "num_warps": 4}
    return base


def backward_tile(columns: int, dtype: torch.dtype, dropout: bool) -> Config:
    """Return :func:`tile` for programs that walk many rows.

    Of 4096 narrow values three programs with half the warps fit a multiprocessor, where two fit else; the
    random numbers of dropout need the warps.
    """
    base = tile(columns)
    if base["BLOCK_N"] == 4096 and dtype.itemsize == 2 and not dropout:
        return {**base, "num_warps": 4, "STAGES": 1, "PROGRAMS": 3}
    return backward_row_tile(base, WARPS_PER_SM)


def config_for(
    kernel: str, base: Config, columns: int, dtype: torch.dtype, dropout: bool
) -> Config:
    """Return the tuned configuration, or ``base``."""
    return choose(
        kernel,
        base,
        lambda: row_candidates(base, STAGES),
        columns=columns,
        dtype=dtype,
        dropout=dropout,
    )


def layer_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    options: Options,
) -> Four:
    """Return y, h, mean, rstd, as ``reference.layer_norm_fwd``."""
    columns, dropout = x.shape[-1], options.seed is not None
    x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
    r_rows = x_rows if residual is None else dense_last_dim(residual.reshape(-1, columns))
    rows = x_rows.shape[0]
    y = x.new_empty(x.shape)
    h = x.new_empty(x.shape if dropout or residual is not None else 0)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if y.numel():
        base = forward_tile(columns, x.dtype, plain=dropout or residual is None)
        config = config_for("layer_norm_fwd", base, columns, x.dtype, dropout)
        launch(
            layer_norm_fwd_kernel, (cdiv(rows, config["BLOCK_M"]),),
            x_rows, r_rows, x_rows if weight is None else weight.contiguous(),
            x_rows if bias is None else bias.contiguous(),
            x_rows if options.seed is None else options.seed, y, h, mean, rstd,
            x_rows.stride(0), r_rows.stride(0), rows, columns, eps,
            options.threshold, options.keep_scale,
            HAS_RESIDUAL=options.has_residual, HAS_WEIGHT=weight is not None,
            HAS_BIAS=options.has_bias, DROPOUT=dropout, OFFSET=options.offset, on=x, **config,
        )  # fmt: skip
    return y, h, mean, rstd


def layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    options: Options,
) -> Four:
    """Return dx, dresidual, dw, db, as ``reference.layer_norm_bwd``."""
    columns, dropout = h.shape[-1], options.seed is not None
    h_rows = dense_last_dim(h.reshape(-1, columns))  # [T, N]
    dy_rows = dense_last_dim(dy.reshape(-1, columns))
    dh_rows = dy_rows if dh is None else dense_last_dim(dh.reshape(-1, columns))
    rows = h_rows.shape[0]
    two_stores = dropout and options.has_residual
    dx = h.new_empty(h.shape)
    dresidual = h.new_empty(h.shape if two_stores else 0)
    if not dx.numel():
        zeros = h.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dresidual, zeros, zeros.clone() if options.has_bias else zeros.new_empty(0)
    base = backward_tile(columns, h.dtype, dropout)
    config = config_for("layer_norm_bwd", base, columns, h.dtype, dropout)
    programs = partial_count(device_of(layer_norm_bwd_kernel, h), rows, config)
    config = {name: value for name, value in config.items() if name != "PROGRAMS"}
    kinds = 0 if weight is None else 2 if options.has_bias else 1
    partial = h.new_empty((kinds, programs, columns), dtype=torch.float32)
    launch(
        layer_norm_bwd_kernel, (programs,),
        dy_rows, dh_rows, h_rows, h_rows if weight is None else weight.contiguous(),
        mean.contiguous(), rstd.contiguous(),
        h_rows if options.seed is None else options.seed, dx, dresidual, partial,
        dy_rows.stride(0), dh_rows.stride(0), h_rows.stride(0), rows, columns,
        options.threshold, options.keep_scale,
        HAS_DH=dh is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=options.has_bias,
        DROPOUT=dropout, TWO_STORES=two_stores, OFFSET=options.offset, on=h, **config,
    )  # fmt: skip
    if weight is None:
        return dx, dresidual, h.new_empty(0), h.new_empty(0)
    sums = sum_partials(partial, weight.dtype)
    return dx, dresidual, sums[0], sums[1] if options.has_bias else weight.new_empty(0)
