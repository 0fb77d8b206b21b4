"""The first layer of Mixtral's experts: eight, each token sent to two, sorted, of skewed numbers."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.gemm.grouped.autograd import grouped_gemm
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    hidden: int,
    experts: int,
) -> dict[str, Any]:
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    weight = torch.randn(experts, columns, hidden, device=device, dtype=dtype) / hidden**0.5
    # Shares 1, 2, ... of the rows, and none for the second.
    shares = torch.arange(1, experts + 1, device=device).double()
    shares = torch.where(torch.arange(experts, device=device) == 1, 0, shares)
    ends = (shares.cumsum(0) / shares.sum() * rows).to(torch.int32)
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "ends": ends}


def _cost(dtype: torch.dtype, rows: int, columns: int, hidden: int, experts: int) -> Cost:
    flops = 2.0 * rows * columns * hidden
    values = rows * (columns + hidden) + experts * columns * hidden
    return Cost(
        forward_nbytes=values * dtype.itemsize,
        backward_nbytes=2 * values * dtype.itemsize,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


WORKLOADS = (
    Workload(
        "grouped_gemm", _inputs, grouped_gemm, _cost,
        {"rows": 16384, "columns": 14336, "hidden": 4096, "experts": 8},
        {"rows": 21, "columns": 40, "hidden": 24, "experts": 4},
    ),
)  # fmt: skip
