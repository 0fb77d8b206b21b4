"""Adasum of two workers' gradients of one large layer."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.adasum.autograd import adasum
from stoker_kernels.workloads import Cost, Workload


def _inputs(device: torch.device | str, dtype: torch.dtype, n: int) -> dict[str, Any]:
    return {"gradients": [torch.randn(n, device=device, dtype=dtype) for _ in range(2)]}


def _cost(dtype: torch.dtype, n: int) -> Cost:
    return Cost(forward_nbytes=5 * n * dtype.itemsize)


WORKLOADS = (
    Workload("adasum", _inputs, adasum, _cost, {"n": 1 << 26}, {"n": 5000}, differentiable=False),
)
