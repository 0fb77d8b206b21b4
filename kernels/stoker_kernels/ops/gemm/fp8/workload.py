"""Linear layers of 8192 by 8192, the size at which fp8 products are usually told of."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.gemm.fp8.autograd import fp8_linear
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, columns: int, hidden: int
) -> dict[str, Any]:
    weight = torch.randn(columns, hidden, device=device, dtype=dtype) / hidden**0.5
    return {
        "x": torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True),
        "weight": weight.requires_grad_(),
    }


def _cost(dtype: torch.dtype, rows: int, columns: int, hidden: int) -> Cost:
    """Count operations of the 16-bit rate, the ceiling that is measured: fp8's may take half of the time."""
    flops = 2.0 * rows * columns * hidden
    values = rows * (columns + hidden) + columns * hidden
    return Cost(
        forward_nbytes=values * dtype.itemsize,
        backward_nbytes=2 * values * dtype.itemsize,
        forward_flops=flops / 2,
        backward_flops=1.5 * flops,
    )


_SHAPE = {"rows": 8192, "columns": 8192, "hidden": 8192}
_SMALL = {"rows": 5, "columns": 40, "hidden": 136}
# On GPUs before sm_89 PyTorch multiplies in 16 bits: no kernel of ours there.
WORKLOADS = (
    Workload(
        "fp8_linear", _inputs, partial(fp8_linear, fallback=True), _cost, _SHAPE, _SMALL,
        dtypes=(torch.bfloat16,),
    ),
    Workload(
        "fp8_linear_block", _inputs, partial(fp8_linear, scaling="block", fallback=True), _cost,
        _SHAPE, _SMALL, dtypes=(torch.bfloat16,),
    ),
)  # fmt: skip
