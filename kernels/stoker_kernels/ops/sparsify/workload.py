"""A large gradient made sparse: plain, with momentum correction, and above a threshold."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.sparsify.autograd import above_compress, topk_compress
from stoker_kernels.runtime.backend import compute_dtype
from stoker_kernels.workloads import Cost, Workload


def _inputs(device: torch.device | str, dtype: torch.dtype, n: int, k: int) -> dict[str, Any]:
    memory = torch.randn(n, device=device, dtype=compute_dtype(dtype))
    return {
        "gradient": torch.randn(n, device=device, dtype=dtype),
        "memory": memory,
        "k": k,
    }


def _momentum_inputs(
    device: torch.device | str, dtype: torch.dtype, n: int, k: int
) -> dict[str, Any]:
    inputs = _inputs(device, dtype, n, k)
    return {
        **inputs,
        "velocity": torch.randn_like(inputs["memory"]),
        "momentum": 0.9,
        "scale": torch.ones(1, device=device, dtype=inputs["memory"].dtype),
    }


def _above_inputs(device: torch.device | str, dtype: torch.dtype, n: int, k: int) -> dict[str, Any]:
    return {
        "memory": torch.randn(n, device=device),
        "threshold": torch.full((1,), 3.0, device=device),
        "capacity": k,
    }


def _cost(buffers: int) -> Any:
    def cost(dtype: torch.dtype, n: int, k: int) -> Cost:
        return Cost(forward_nbytes=n * (dtype.itemsize + 8 * buffers + 4) + 8 * k)

    return cost


def _above_cost(dtype: torch.dtype, n: int, k: int) -> Cost:
    return Cost(forward_nbytes=8 * n + 8 * k)


_SHAPE, _SMALL = {"n": 1 << 26, "k": 1 << 16}, {"n": 9000, "k": 50}
WORKLOADS = (
    Workload(
        "topk_compress", _inputs, topk_compress, _cost(1), _SHAPE, _SMALL, differentiable=False
    ),
    Workload(
        "topk_compress_momentum", _momentum_inputs, topk_compress, _cost(2), _SHAPE, _SMALL,
        differentiable=False,
    ),
    Workload(
        "above_compress", _above_inputs, above_compress, _above_cost, _SHAPE, _SMALL,
        dtypes=(torch.float32,), differentiable=False,
    ),
)  # fmt: skip
