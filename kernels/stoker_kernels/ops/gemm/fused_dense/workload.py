"""The dense layers of a GPT-2 style and of a LLaMA-style feed-forward block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.gemm.fused_dense.autograd import fused_dense, fused_glu_dense
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int, hidden: int
) -> dict[str, Any]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    return {
        "x": made(rows, hidden).requires_grad_(),
        "weight": (made(columns, hidden) / hidden**0.5).requires_grad_(),
        "bias": made(columns).requires_grad_(),
    }


def _residual_inputs(
    device: torch.device | str, dtype: torch.dtype, **shape: int
) -> dict[str, Any]:
    """Add a residual stream in fp32, as beside 16-bit layers."""
    residual = torch.randn(shape["rows"], shape["columns"], device=device)
    return {**_inputs(device, dtype, **shape), "residual": residual.requires_grad_()}


def _glu_inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int, hidden: int
) -> dict[str, Any]:
    inputs = _inputs(device, dtype, rows, 2 * columns, hidden)
    return {"x": inputs["x"], "weight": inputs["weight"]}


def _cost(products: int, dtype: torch.dtype, rows: int, columns: int, hidden: int) -> Cost:
    """Count ``products`` weights; the pre-activation is written and read."""
    flops = 2.0 * products * rows * columns * hidden
    operands = rows * hidden + products * columns * hidden
    wide = (products + 1) * rows * columns
    return Cost(
        forward_nbytes=(operands + wide) * dtype.itemsize,
        backward_nbytes=(2 * operands + (2 * products + 1) * rows * columns) * dtype.itemsize,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


_SMALL = {"rows": 5, "columns": 48, "hidden": 24}
WORKLOADS = (
    Workload(
        "fused_dense", _inputs, partial(fused_dense, activation="gelu_tanh"), partial(_cost, 1),
        {"rows": 16384, "columns": 3072, "hidden": 768}, _SMALL, ({"hidden": 1008},),
    ),
    Workload(
        "fused_dense_residual", _residual_inputs, partial(fused_dense, activation="gelu"),
        partial(_cost, 1), {"rows": 16384, "columns": 4096, "hidden": 1024}, _SMALL,
    ),
    Workload(
        "fused_glu_dense", _glu_inputs, fused_glu_dense, partial(_cost, 2),
        {"rows": 16384, "columns": 11008, "hidden": 4096}, _SMALL,
    ),
)  # fmt: skip
