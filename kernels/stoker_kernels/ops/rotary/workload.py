"""Rotary embedding of a layer's queries: a batch in both layouts and of both memory orders, and packed."""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.rotary.autograd import rotary, rotary_tables
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, batch: int, tokens: int, heads: int, dim: int
) -> dict[str, Any]:
    shape = batch, tokens, heads, dim
    cos, sin = rotary_tables(dim, tokens, device=device)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return {"x": x, "cos": cos, "sin": sin}


def _packed_inputs(
    device: torch.device | str, dtype: torch.dtype, batch: int, tokens: int, heads: int, dim: int
) -> dict[str, Any]:
    inputs = _inputs(device, dtype, batch, tokens, heads, dim)
    x = inputs["x"].detach().flatten(0, 1).requires_grad_()
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * tokens
    return {**inputs, "x": x, "cu_seqlens": ends}


def _swapped_inputs(
    device: torch.device | str, dtype: torch.dtype, batch: int, tokens: int, heads: int, dim: int
) -> dict[str, Any]:
    x = torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype, requires_grad=True)
    cos, sin = rotary_tables(dim // 2, tokens, device=device)
    return {"x": x, "cos": cos, "sin": sin}


def _interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary(x, cos, sin, interleaved=True)


def _partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary(x.transpose(1, 2), cos, sin).transpose(1, 2)


def _cost(dtype: torch.dtype, batch: int, tokens: int, heads: int, dim: int) -> Cost:
    nbytes = 2 * batch * tokens * heads * dim * dtype.itemsize
    return Cost(forward_nbytes=nbytes, backward_nbytes=nbytes)


_SHAPE = {"batch": 8, "tokens": 2048, "heads": 32, "dim": 128}
_SMALL = {"batch": 2, "tokens": 5, "heads": 3, "dim": 16}
WORKLOADS = (
    Workload("rotary", _inputs, rotary, _cost, _SHAPE, _SMALL, ({"dim": 64}, {"heads": 8})),
    Workload("rotary_interleaved", _inputs, _interleaved, _cost, _SHAPE, _SMALL),
    Workload("rotary_packed", _packed_inputs, rotary, _cost, _SHAPE, _SMALL),
    Workload("rotary_partial", _swapped_inputs, _partial, _cost, _SHAPE, _SMALL),
)
