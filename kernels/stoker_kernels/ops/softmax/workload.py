"""Softmax of attention scores: with a padding mask, and causal."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.softmax.autograd import softmax
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int
) -> dict[str, Any]:
    shape = (batch, heads, queries, keys)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return {"x": x, "scale": 0.125}


def _causal_inputs(device: torch.device | str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    return {**_inputs(device, dtype, **shape), "causal": True}


def _masked_inputs(device: torch.device | str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    """Make sequences of different lengths: a quarter of the keys is padding on average."""
    batch, keys = shape["batch"], shape["keys"]
    lengths = torch.linspace(keys / 2, keys, batch, device=device)
    mask = torch.arange(keys, device=device) < lengths[:, None, None, None]
    return {**_inputs(device, dtype, **shape), "mask": mask}


def _cost(
    dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, read: float = 1.0
) -> Cost:
    nbytes = batch * heads * queries * keys * dtype.itemsize
    return Cost(forward_nbytes=(read + 1) * nbytes, backward_nbytes=(2 * read + 1) * nbytes)


def _causal_cost(dtype: torch.dtype, **shape: int) -> Cost:
    """Count half of every input, which is never read; the zeros are written."""
    return _cost(dtype, **shape, read=0.5)


_SHAPE = {"batch": 8, "heads": 16, "queries": 2048, "keys": 2048}
_SMALL = {"batch": 2, "heads": 2, "queries": 5, "keys": 48}
WORKLOADS = (
    Workload("masked_softmax", _masked_inputs, softmax, _cost, _SHAPE, _SMALL),
    Workload(
        "causal_softmax", _causal_inputs, softmax, _causal_cost, _SHAPE, _SMALL,
        variants=({"batch": 1, "heads": 1, "keys": 65536},),
    ),
)  # fmt: skip
