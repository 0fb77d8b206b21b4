"""The gated linear unit as a LLaMA-style feed-forward layer calls it."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.glu.autograd import geglu, swiglu
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    packed = torch.randn(rows, 2 * columns, device=device, dtype=dtype, requires_grad=True)
    return {"packed": packed}


def _cost(dtype: torch.dtype, rows: int, columns: int) -> Cost:
    nbytes = rows * columns * dtype.itemsize
    return Cost(forward_nbytes=3 * nbytes, backward_nbytes=5 * nbytes)


_SHAPE = {"rows": 16384, "columns": 11008}
_SMALL = {"rows": 5, "columns": 48}
WORKLOADS = (
    Workload("swiglu", _inputs, swiglu, _cost, _SHAPE, _SMALL),
    Workload("geglu", _inputs, geglu, _cost, _SHAPE, _SMALL),
)
