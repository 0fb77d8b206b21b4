"""Bias + GELU on the GPU: one elementwise kernel each way over tiles of rows by columns, no atomics.

Backward programs stay in one block of columns and walk many rows, adding up dbias in registers; each
writes one partial row of its block, summed afterwards, so results repeat bit for bit. Bytes moved (b per
value, T rows, N columns): forward 2*T*N*b, backward 3*T*N*b plus PARTIALS*N*4.
Formulas: see ``reference`` and ``primitives.activations``. bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.activations import activate, activate_and_slope
from stoker_kernels.primitives.partials import sum_partials
from stoker_kernels.primitives.tiling import candidates, cdiv, tile
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    from stoker_kernels.runtime.device import Device

WARPS_PER_SM = 24  # backward: all resident at 72 registers a thread (28 fit), so no program waits


@triton.jit(do_not_specialize=["rows"])
def bias_gelu_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, stride, rows, columns,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    column = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    y = activate(x.to(tl.float32) + bias[None, :], KIND)
    y_ptrs = y_ptr + row[:, None] * columns + column[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "partials"])
def bias_gelu_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, stride_dy, stride, rows, columns, partials,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    first = program // blocks  # which share of the rows
    column = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for block in tl.range(first, tl.cdiv(rows, BLOCK_M), partials, num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0)
        _, slope = activate_and_slope(x.to(tl.float32) + bias[None, :], KIND)
        dx = dy.to(tl.float32) * slope  # [M, N]
        total += dx
        dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptrs = partial_ptr + first.to(tl.int64) * columns + column
    tl.store(partial_ptrs, tl.sum(total, 0), mask=column < columns)


def config_for(kernel: str, base: Config, columns: int, dtype: torch.dtype) -> Config:
    """Return the tuned configuration, or ``base``."""

    def tried() -> list[Config]:
        return [{**base, **config} for config in candidates(columns, dtype)]

    return choose(kernel, base, tried, columns=columns, dtype=dtype)


def forward_tile(columns: int, dtype: torch.dtype, kind: str) -> Config:
    """Return :func:`tile`; of narrow values twice the rows where issuing instructions takes longest (erf).

    Then a thread loads and converts a bias for two values, and finds its place once for twice as many.
    """
    base = tile(columns, dtype)
    if kind == "gelu_erf" and dtype.itemsize == 2:
        return {**base, "BLOCK_M": 2 * base["BLOCK_M"]}
    return base


def partial_count(device: Device, rows: int, columns: int, config: Config) -> int:
    """Return the programs per block of columns, each with one partial row: enough to fill the device."""
    most = cdiv(rows, config["BLOCK_M"])
    if device.interpreted:
        return min(most, 3)
    programs = device.multiprocessors * max(1, WARPS_PER_SM // config["num_warps"])
    return min(most, cdiv(programs, cdiv(columns, config["BLOCK_N"])))


def bias_gelu_fwd(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.bias_gelu_fwd`` on the GPU."""
    columns = x.shape[-1]
    y = x.new_empty(x.shape)
    if y.numel():
        x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
        rows = x_rows.shape[0]
        config = config_for("bias_gelu_fwd", forward_tile(columns, x.dtype, kind), columns, x.dtype)
        tiles = cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"])
        launch(
            bias_gelu_fwd_kernel, (tiles,),
            x_rows, bias.contiguous(), y, x_rows.stride(0), rows, columns,
            KIND=kind, on=x, **config,
        )  # fmt: skip
    return y


def bias_gelu_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.bias_gelu_bwd`` on the GPU."""
    columns = x.shape[-1]
    dx = x.new_empty(x.shape)
    if not dx.numel():
        return dx, bias.new_zeros(bias.shape)
    x_rows = dense_last_dim(x.reshape(-1, columns))  # [T, N]
    dy_rows = dense_last_dim(dy.reshape(-1, columns))
    rows = x_rows.shape[0]
    config = config_for("bias_gelu_bwd", {**tile(columns, x.dtype), "STAGES": 2}, columns, x.dtype)
    partials = partial_count(device_of(bias_gelu_bwd_kernel, x), rows, columns, config)
    dbias = x.new_empty((1, partials, columns), dtype=torch.float32)
    launch(
        bias_gelu_bwd_kernel, (partials * cdiv(columns, config["BLOCK_N"]),),
        dy_rows, x_rows, bias.contiguous(), dx, dbias, dy_rows.stride(0), x_rows.stride(0),
        rows, columns, partials,
        KIND=kind, on=x, **config,
    )  # fmt: skip
    return dx, sum_partials(dbias, bias.dtype)[0]
