"""The gated linear unit as a LLaMA-style feed-forward layer calls it."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.glu.autograd import geglu, swiglu
from stoker_kernels.workloads import Workload, tensors_cost


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    packed = torch.randn(rows, 2 * columns, device=device, dtype=dtype, requires_grad=True)
    return {"packed": packed}


def _pair(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    gate, up = (
        torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    return {"packed": gate, "up": up}


_SHAPE = {"rows": 16384, "columns": 11008}
_SMALL = {"rows": 5, "columns": 48}
WORKLOADS = (
    Workload("swiglu", _inputs, swiglu, tensors_cost(3, 5), _SHAPE, _SMALL),
    Workload("swiglu_pair", _pair, swiglu, tensors_cost(3, 5), _SHAPE, _SMALL),
    Workload("geglu", _inputs, geglu, tensors_cost(3, 5), _SHAPE, _SMALL),
)
