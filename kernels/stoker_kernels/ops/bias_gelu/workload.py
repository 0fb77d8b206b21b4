"""Bias + GELU as a GPT feed-forward layer calls it, four times the model's width."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.bias_gelu.autograd import bias_gelu
from stoker_kernels.workloads import Workload, tensors_cost


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True),
        "bias": torch.randn(columns, device=device, dtype=dtype, requires_grad=True),
    }


_SHAPE = {"rows": 16384, "columns": 16384}
_SMALL = {"rows": 5, "columns": 48}
WORKLOADS = (
    Workload("bias_gelu", _inputs, bias_gelu, tensors_cost(2, 3), _SHAPE, _SMALL),
    Workload(
        "bias_gelu_erf",
        _inputs,
        partial(bias_gelu, approximate="none"),
        tensors_cost(2, 3),
        _SHAPE,
        _SMALL,
    ),
)
