"""Prefix sums of long rows, and a sort of them."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.scan.autograd import prefix_sum, radix_sort
from stoker_kernels.workloads import Cost, Workload, tensors_cost

INDEX_NBYTES = 8


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    # None is negative: where sums cancel, the order of additions shows.
    x = torch.rand(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return {"x": x}


def _sorted(x: torch.Tensor) -> torch.Tensor:
    return radix_sort(x)[0]


def _sort_cost(dtype: torch.dtype, rows: int, columns: int) -> Cost:
    n = rows * columns
    moved = n * (2 * dtype.itemsize + INDEX_NBYTES)  # values read and written, indices written
    return Cost(forward_nbytes=moved, backward_nbytes=moved)


WORKLOADS = (
    Workload(
        "prefix_sum", _inputs, prefix_sum, tensors_cost(2, 2),
        {"rows": 64, "columns": 1 << 20}, {"rows": 3, "columns": 4500},
    ),
    Workload(
        "radix_sort", _inputs, _sorted, _sort_cost,
        {"rows": 1, "columns": 1 << 24}, {"rows": 2, "columns": 700},
    ),
)  # fmt: skip
