"""1-bit compression of one large gradient, and the mean of what four workers sent."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.onebit.autograd import BLOCK, onebit_compress, onebit_decompress
from stoker_kernels.runtime.backend import compute_dtype
from stoker_kernels.workloads import Cost, Workload

WORKERS = 4


def _compress_inputs(device: torch.device | str, dtype: torch.dtype, n: int) -> dict[str, Any]:
    error = torch.zeros(n, device=device, dtype=compute_dtype(dtype))
    return {"gradient": torch.randn(n, device=device, dtype=dtype), "error": error}


def _decompress_inputs(device: torch.device | str, dtype: torch.dtype, n: int) -> dict[str, Any]:
    shape = WORKERS, -(-n // 32)
    return {
        "words": torch.randint(-(2**31), 2**31, shape, device=device, dtype=torch.int32),
        "scales": torch.rand(WORKERS, -(-n // BLOCK), device=device),
        "n": n,
        "dtype": dtype,
    }


def _compress_cost(dtype: torch.dtype, n: int) -> Cost:
    return Cost(forward_nbytes=n * (dtype.itemsize + 8 + 1 / 8 + 4 / BLOCK))


def _decompress_cost(dtype: torch.dtype, n: int) -> Cost:
    return Cost(forward_nbytes=n * (dtype.itemsize + WORKERS * (1 / 8 + 4 / BLOCK)))


_SHAPE, _SMALL = {"n": 1 << 26}, {"n": 2500}
WORKLOADS = (
    Workload(
        "onebit_compress", _compress_inputs, onebit_compress, _compress_cost, _SHAPE, _SMALL,
        differentiable=False,
    ),
    Workload(
        "onebit_decompress", _decompress_inputs, onebit_decompress, _decompress_cost, _SHAPE, _SMALL,
        differentiable=False,
    ),
)  # fmt: skip
