"""RMSNorm as a transformer layer calls it, without and with the residual sum."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.rms_norm.autograd import rms_norm
from stoker_kernels.workloads import Workload, tensors_cost


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True),
        "weight": torch.ones(columns, device=device, dtype=dtype, requires_grad=True),
    }


def _residual_inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    residual = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return {**_inputs(device, dtype, rows, columns), "residual": residual}


_SHAPE = {"rows": 16384, "columns": 4096}
_SMALL = {"rows": 5, "columns": 48}
WORKLOADS = (
    Workload("rms_norm", _inputs, rms_norm, tensors_cost(2, 3), _SHAPE, _SMALL),
    Workload("add_rms_norm", _residual_inputs, rms_norm, tensors_cost(4, 4), _SHAPE, _SMALL),
)
