"""Rotary embedding of a layer's queries: a batch in both layouts, and packed sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.rotary.autograd import rotary, rotary_tables
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str,
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    heads: int,
    dim: int,
    rotary_dim: int,
) -> dict[str, Any]:
    cos, sin = rotary_tables(rotary_dim, tokens, device=device)
    x = torch.randn(batch, tokens, heads, dim, device=device, dtype=dtype, requires_grad=True)
    return {"x": x, "cos": cos, "sin": sin}


def _packed_inputs(
    device: torch.device | str, dtype: torch.dtype, batch: int, tokens: int, **sizes: int
) -> dict[str, Any]:
    inputs = _inputs(device, dtype, batch, tokens, **sizes)
    x = inputs["x"].detach().flatten(0, 1).requires_grad_()
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * tokens
    return {**inputs, "x": x, "cu_seqlens": ends}


def _cost(
    dtype: torch.dtype, batch: int, tokens: int, heads: int, dim: int, rotary_dim: int
) -> Cost:
    nbytes = 2 * batch * tokens * heads * dim * dtype.itemsize
    return Cost(forward_nbytes=nbytes, backward_nbytes=nbytes)


_SHAPE = {"batch": 8, "tokens": 2048, "heads": 32, "dim": 128, "rotary_dim": 128}
_SMALL = {"batch": 2, "tokens": 5, "heads": 3, "dim": 16, "rotary_dim": 12}
WORKLOADS = (
    Workload("rotary", _inputs, rotary, _cost, _SHAPE, _SMALL, ({"heads": 8}, {"rotary_dim": 64})),
    Workload(
        "rotary_interleaved", _inputs, partial(rotary, interleaved=True), _cost, _SHAPE, _SMALL
    ),
    Workload("rotary_packed", _packed_inputs, rotary, _cost, _SHAPE, _SMALL),
)
