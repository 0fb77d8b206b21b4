"""LayerNorm as a transformer layer calls it: alone, and at the end of a block with dropout."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.layer_norm.autograd import layer_norm
from stoker_kernels.workloads import Workload, tensors_cost


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True),
        "weight": torch.ones(columns, device=device, dtype=dtype, requires_grad=True),
        "bias": torch.zeros(columns, device=device, dtype=dtype, requires_grad=True),
    }


def _dropout_inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    residual = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return {**_inputs(device, dtype, rows, columns), "residual": residual, "dropout_p": 0.1}


_SHAPE = {"rows": 16384, "columns": 4096}
_SMALL = {"rows": 5, "columns": 48}
WORKLOADS = (
    Workload("layer_norm", _inputs, layer_norm, tensors_cost(2, 3), _SHAPE, _SMALL),
    Workload(
        "dropout_add_layer_norm", _dropout_inputs, layer_norm, tensors_cost(4, 5), _SHAPE, _SMALL,
        variants=({"columns": 768},),
    ),
)  # fmt: skip
