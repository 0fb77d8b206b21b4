"""Gated linear units on the GPU: one elementwise kernel each way over tiles of rows by columns.

Bytes moved (b per value, T rows, F columns): forward 3*T*F*b, backward 5*T*F*b: every value of the packed
input, the gradient and the result once. Formulas: see ``reference`` and ``primitives.activations``.
bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from stoker_kernels.primitives.activations import activate, activate_and_slope
from stoker_kernels.primitives.tiling import candidates, cdiv, tile
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    import torch


@triton.jit
def _tile_of(columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows [M] int64 and columns [N]; neighbouring programs share rows."""
    blocks = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["rows"])
def glu_fwd_kernel(
    packed_ptr, y_ptr, stride, rows, columns,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(columns, BLOCK_M, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate_ptrs = packed_ptr + row[:, None] * stride + column[None, :]  # [M, N]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, KIND) * up
    y_ptrs = y_ptr + row[:, None] * columns + column[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def glu_bwd_kernel(
    dy_ptr, packed_ptr, dpacked_ptr, stride_dy, stride, rows, columns,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(columns, BLOCK_M, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate_ptrs = packed_ptr + row[:, None] * stride + column[None, :]  # [M, N]
    dy_ptrs = dy_ptr + row[:, None] * stride_dy + column[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_and_slope(gate, KIND)
    dgate_ptrs = dpacked_ptr + row[:, None] * (2 * columns) + column[None, :]
    tl.store(dgate_ptrs, (dy * up * slope).to(dpacked_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptrs + columns, (dy * value).to(dpacked_ptr.dtype.element_ty), mask=mask)


def config_for(kernel: str, columns: int, dtype: torch.dtype) -> Config:
    """Return the tuned configuration, or the heuristic."""

    def tried() -> list[Config]:
        return candidates(columns, dtype)

    return choose(kernel, tile(columns, dtype), tried, columns=columns, dtype=dtype)


def grid_of(rows: int, columns: int, config: Config) -> tuple[int]:
    """Return the grid with one program per tile."""
    return (cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"]),)


def glu_fwd(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.glu_fwd`` on the GPU."""
    columns = packed.shape[-1] // 2
    y = packed.new_empty((*packed.shape[:-1], columns))
    if y.numel():
        packed_rows = dense_last_dim(packed.reshape(-1, 2 * columns))  # [T, 2F]
        rows = packed_rows.shape[0]
        config = config_for("glu_fwd", columns, packed.dtype)
        launch(
            glu_fwd_kernel, grid_of(rows, columns, config),
            packed_rows, y, packed_rows.stride(0), rows, columns,
            KIND=kind, on=packed, **config,
        )  # fmt: skip
    return y


def glu_bwd(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.glu_bwd`` on the GPU."""
    columns = packed.shape[-1] // 2
    dpacked = packed.new_empty(packed.shape)
    if dpacked.numel():
        packed_rows = dense_last_dim(packed.reshape(-1, 2 * columns))  # [T, 2F]
        dy_rows = dense_last_dim(dy.reshape(-1, columns))  # [T, F]
        rows = packed_rows.shape[0]
        config = config_for("glu_bwd", columns, packed.dtype)
        launch(
            glu_bwd_kernel, grid_of(rows, columns, config),
            dy_rows, packed_rows, dpacked, dy_rows.stride(0), packed_rows.stride(0), rows, columns,
            KIND=kind, on=packed, **config,
        )  # fmt: skip
    return dpacked
