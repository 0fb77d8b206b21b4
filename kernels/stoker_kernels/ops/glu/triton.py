"""Gated linear units on the GPU: one elementwise kernel each way over tiles of rows by columns.

Bytes moved (b per value, T rows, F columns): forward 3*T*F*b, backward 5*T*F*b: every value of the
inputs, the gradients and the result once. gate and up may be two tensors or the halves of one: a kernel
gets a pointer and a row stride of each. Formulas: see ``reference`` and ``primitives.activations``.
bf16 is widened on load and only rounded on store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from stoker_kernels.ops.glu.reference import halves
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
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, rows, columns,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(columns, BLOCK_M, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate_ptrs = gate_ptr + row[:, None] * stride_gate + column[None, :]  # [M, N]
    up_ptrs = up_ptr + row[:, None] * stride_up + column[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, KIND) * up
    y_ptrs = y_ptr + row[:, None] * columns + column[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, stride_dy, stride_gate, stride_up, stride_out,
    rows, columns, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(columns, BLOCK_M, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate_ptrs = gate_ptr + row[:, None] * stride_gate + column[None, :]  # [M, N]
    up_ptrs = up_ptr + row[:, None] * stride_up + column[None, :]
    dy_ptrs = dy_ptr + row[:, None] * stride_dy + column[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_and_slope(gate, KIND)
    out = row[:, None] * stride_out + column[None, :]
    tl.store(dgate_ptr + out, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + out, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)


def config_for(kernel: str, columns: int, dtype: torch.dtype) -> Config:
    """Return the tuned configuration, or the heuristic."""

    def tried() -> list[Config]:
        return candidates(columns, dtype)

    return choose(kernel, tile(columns, dtype), tried, columns=columns, dtype=dtype)


def grid_of(rows: int, columns: int, config: Config) -> tuple[int]:
    """Return the grid with one program per tile."""
    return (cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"]),)


def _fwd(gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor, kind: str) -> None:
    """Fill y (..., F) of gate, up (T, F), whose last dimension is dense."""
    rows, columns = gate.shape
    config = config_for("glu_fwd", columns, y.dtype)
    launch(
        glu_fwd_kernel, grid_of(rows, columns, config),
        gate, up, y, gate.stride(0), up.stride(0), rows, columns, KIND=kind, on=y, **config,
    )  # fmt: skip


def _bwd(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    kind: str,
) -> None:
    """Fill dgate, dup (T, F), of equal strides."""
    rows, columns = gate.shape
    dy = dense_last_dim(dy.reshape(rows, columns))
    config = config_for("glu_bwd", columns, dgate.dtype)
    launch(
        glu_bwd_kernel, grid_of(rows, columns, config),
        dy, gate, up, dgate, dup, dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0),
        rows, columns, KIND=kind, on=dgate, **config,
    )  # fmt: skip


def glu_fwd(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.glu_fwd`` on the GPU."""
    columns = packed.shape[-1] // 2
    y = packed.new_empty((*packed.shape[:-1], columns))
    if y.numel():
        _fwd(*halves(dense_last_dim(packed.reshape(-1, 2 * columns))), y, kind)
    return y


def glu_bwd(dy: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.glu_bwd`` on the GPU."""
    columns = packed.shape[-1] // 2
    dpacked = packed.new_empty(packed.shape)
    if dpacked.numel():
        gate, up = halves(dense_last_dim(packed.reshape(-1, 2 * columns)))
        _bwd(dy, gate, up, *halves(dpacked.view(-1, 2 * columns)), kind)
    return dpacked


def glu_pair_fwd(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``reference.glu_pair_fwd`` on the GPU."""
    y = gate.new_empty(gate.shape)
    if y.numel():
        gate, up = (dense_last_dim(t.reshape(-1, gate.shape[-1])) for t in (gate, up))
        _fwd(gate, up, y, kind)
    return y


def glu_pair_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.glu_pair_bwd`` on the GPU."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if dgate.numel():
        columns = gate.shape[-1]
        gate, up = (dense_last_dim(t.reshape(-1, columns)) for t in (gate, up))
        _bwd(dy, gate, up, dgate.view(-1, columns), dup.view(-1, columns), kind)
    return dgate, dup
