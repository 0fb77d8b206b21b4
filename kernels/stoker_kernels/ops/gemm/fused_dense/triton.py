"""Fused dense layers on the GPU: one GEMM kernel with its epilogue forward, one elementwise kernel backward.

Forward: bias, activation (or a gate, with two accumulators in one program) and residual happen on the
accumulators; the result is written once, and the pre-activation once if the backward wants it. Nothing
is read twice but the operands, tile by tile. Backward programs stay in one block of columns and walk many
rows, adding up the bias' gradient in registers; each writes one partial row, summed afterwards, so
results repeat bit for bit. The two matrix products of the backward are PyTorch's (cuBLAS).
Formulas: see ``reference``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.bias_gelu.triton import config_for as columns_config
from stoker_kernels.ops.bias_gelu.triton import partial_count
from stoker_kernels.ops.gemm import configs
from stoker_kernels.ops.gemm.configs import operand
from stoker_kernels.ops.gemm.tiles import (
    add_row,
    add_tile,
    load_tile,
    product,
    rows_at,
    store_tile,
    tile_at,
)
from stoker_kernels.primitives.activations import activate, activate_and_slope
from stoker_kernels.primitives.partials import sum_partials
from stoker_kernels.primitives.tiling import cdiv, tile
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    from stoker_kernels.runtime.device import Device


@triton.jit(do_not_specialize=["rows"])
def fused_dense_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, z_ptr, stride_x, stride_w, stride_residual,
    rows, columns, inner,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tile_at(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    x, of_row = rows_at(x_ptr, m * BLOCK_M, rows, stride_x, BLOCK_M)
    w, of_column = rows_at(w_ptr, n * BLOCK_N, columns, stride_w, BLOCK_N)
    z = product(
        x, w, of_row, of_column, inner, EVEN_K, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    if HAS_BIAS:
        z = add_row(bias_ptr, z, n, columns, BLOCK_N)
    if SAVE:
        store_tile(z_ptr, z, m, n, rows, columns, columns, BLOCK_M, BLOCK_N)
    if KIND != "none":
        z = activate(z, KIND)
    if HAS_RESIDUAL:
        z = add_tile(residual_ptr, z, m, n, rows, columns, stride_residual, BLOCK_M, BLOCK_N)
    store_tile(y_ptr, z, m, n, rows, columns, columns, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["rows"])
def fused_glu_dense_fwd_kernel(
    x_ptr, gate_w_ptr, up_w_ptr, gate_bias_ptr, up_bias_ptr, residual_ptr, y_ptr, z_ptr,
    stride_x, stride_gate, stride_up, stride_residual, rows, columns, inner,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tile_at(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    x_ptr, of_row = rows_at(x_ptr, m * BLOCK_M, rows, stride_x, BLOCK_M)
    gate_w_ptr, of_gate = rows_at(gate_w_ptr, n * BLOCK_N, columns, stride_gate, BLOCK_N)
    up_w_ptr, of_up = rows_at(up_w_ptr, n * BLOCK_N, columns, stride_up, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        remaining = inner - start
        x = load_tile(x_ptr + of_row[:, None] + k[None, :], k, remaining, EVEN_K, UPCAST)
        w = load_tile(gate_w_ptr + of_gate[:, None] + k[None, :], k, remaining, EVEN_K, UPCAST)
        gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        w = load_tile(up_w_ptr + of_up[:, None] + k[None, :], k, remaining, EVEN_K, UPCAST)
        up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
        x_ptr += BLOCK_K
        gate_w_ptr += BLOCK_K
        up_w_ptr += BLOCK_K
    if HAS_BIAS:
        gate = add_row(gate_bias_ptr, gate, n, columns, BLOCK_N)
        up = add_row(up_bias_ptr, up, n, columns, BLOCK_N)
    if SAVE:
        store_tile(z_ptr, gate, m, n, rows, columns, 2 * columns, BLOCK_M, BLOCK_N)
        store_tile(z_ptr + columns, up, m, n, rows, columns, 2 * columns, BLOCK_M, BLOCK_N)
    y = activate(gate, KIND) * up
    if HAS_RESIDUAL:
        y = add_tile(residual_ptr, y, m, n, rows, columns, stride_residual, BLOCK_M, BLOCK_N)
    store_tile(y_ptr, y, m, n, rows, columns, columns, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["rows", "partials"])
def fused_dense_bwd_kernel(
    dy_ptr, z_ptr, dz_ptr, partial_ptr, stride_dy, rows, columns, partials,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z and dz are (rows, columns), or (rows, 2 columns) = [gate | up] if GATED; so are the partial rows."""
    WIDTH: tl.constexpr = 2 if GATED else 1
    blocks = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    first = program // blocks  # which share of the rows
    column = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    total_up = tl.zeros([BLOCK_N], dtype=tl.float32)
    for block in tl.range(first, tl.cdiv(rows, BLOCK_M), partials, num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * (WIDTH * columns) + column[None, :]
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0)
        z = tl.load(z_ptr + place, mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        value, slope = activate_and_slope(z.to(tl.float32), KIND)
        if GATED:
            up = tl.load(z_ptr + place + columns, mask=mask, other=0.0).to(tl.float32)
            dup = dy * value
            dy *= up
            tl.store(dz_ptr + place + columns, dup.to(dz_ptr.dtype.element_ty), mask=mask)
            if HAS_BIAS:
                total_up += tl.sum(dup, 0)
        dz = dy * slope  # [M, N]
        tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            total += tl.sum(dz, 0)
    if HAS_BIAS:
        partial_ptrs = partial_ptr + first.to(tl.int64) * (WIDTH * columns) + column
        tl.store(partial_ptrs, total, mask=column < columns)
        if GATED:
            tl.store(partial_ptrs + columns, total_up, mask=column < columns)


def config_for(
    kernel: str,
    device: Device,
    dtype: torch.dtype,
    columns: int,
    inner: int,
    accumulators: int,
) -> Config:
    """Return the tuned configuration, or the heuristic."""
    shape = dtype.itemsize, device, accumulators, inner % configs.ALIGNED == 0
    return choose(
        kernel,
        configs.config(*shape),
        lambda: configs.candidates(*shape),
        columns=columns,
        inner=inner,
        dtype=dtype,
    )


def _flags(x: torch.Tensor, device: Device, inner: int, config: Config) -> dict[str, bool]:
    narrow = device.interpreted and x.dtype != torch.float32
    return {"EVEN_K": inner % config["BLOCK_K"] == 0, "UPCAST": narrow}


def fused_dense_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, z, as ``reference.fused_dense_fwd``, in one launch."""
    columns, inner = weight.shape
    x_rows, weight = operand(x.reshape(-1, inner)), operand(weight)
    rows = x_rows.shape[0]
    y = x.new_empty((*x.shape[:-1], columns), dtype=(x if residual is None else residual).dtype)
    z = x.new_empty((rows, columns) if save else 0)
    r_rows = x_rows if residual is None else operand(residual.reshape(-1, columns))
    if y.numel():
        device = device_of(fused_dense_fwd_kernel, x)
        config = config_for("fused_dense_fwd", device, x.dtype, columns, inner, 1)
        launch(
            fused_dense_fwd_kernel,
            (cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"]),),
            x_rows, weight, x_rows if bias is None else bias.contiguous(), r_rows, y, z,
            x_rows.stride(0), weight.stride(0), r_rows.stride(0), rows, columns, inner,
            KIND=kind, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, SAVE=save,
            **_flags(x, device, inner, config), on=x, **config,
        )  # fmt: skip
    return y, z


def fused_glu_dense_fwd(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, z, as ``reference.fused_glu_dense_fwd``, in one launch."""
    columns, inner = gate_weight.shape
    x_rows = operand(x.reshape(-1, inner))
    gate_weight, up_weight = operand(gate_weight), operand(up_weight)
    rows = x_rows.shape[0]
    y = x.new_empty((*x.shape[:-1], columns), dtype=(x if residual is None else residual).dtype)
    z = x.new_empty((rows, 2 * columns) if save else 0)
    r_rows = x_rows if residual is None else operand(residual.reshape(-1, columns))
    if y.numel():
        device = device_of(fused_glu_dense_fwd_kernel, x)
        config = config_for("fused_glu_dense_fwd", device, x.dtype, columns, inner, 2)
        launch(
            fused_glu_dense_fwd_kernel,
            (cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"]),),
            x_rows, gate_weight, up_weight,
            x_rows if gate_bias is None else gate_bias.contiguous(),
            x_rows if up_bias is None else up_bias.contiguous(), r_rows, y, z,
            x_rows.stride(0), gate_weight.stride(0), up_weight.stride(0), r_rows.stride(0),
            rows, columns, inner,
            KIND=kind, HAS_BIAS=gate_bias is not None, HAS_RESIDUAL=residual is not None, SAVE=save,
            **_flags(x, device, inner, config), on=x, **config,
        )  # fmt: skip
    return y, z


def fused_dense_bwd(
    dy: torch.Tensor, z: torch.Tensor, kind: str, gated: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dz, db, as ``reference.fused_dense_bwd``."""
    width = z.shape[1]
    columns = width // 2 if gated else width
    dz = z.new_empty(z.shape)
    if not dz.numel():
        return dz, z.new_zeros(width if has_bias else 0, dtype=torch.float32)
    z, dy_rows = z.contiguous(), dense_last_dim(dy.reshape(-1, columns))
    rows = z.shape[0]
    config = columns_config(
        "fused_dense_bwd", {**tile(columns, z.dtype), "STAGES": 2}, columns, z.dtype
    )
    partials = partial_count(device_of(fused_dense_bwd_kernel, z), rows, columns, config)
    partial = z.new_empty((1, partials, width) if has_bias else 0, dtype=torch.float32)
    launch(
        fused_dense_bwd_kernel, (partials * cdiv(columns, config["BLOCK_N"]),),
        dy_rows, z, dz, partial, dy_rows.stride(0), rows, columns, partials,
        KIND=kind, GATED=gated, HAS_BIAS=has_bias, on=z, **config,
    )  # fmt: skip
    db = sum_partials(partial, torch.float32)[0] if has_bias else partial
    return dz, db
