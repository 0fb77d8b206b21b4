"""The head of a language model: logits of a large vocabulary and their loss, fused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.linear_cross_entropy.autograd import linear_cross_entropy
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, hidden: int, vocab: int
) -> dict[str, Any]:
    weight = torch.randn(vocab, hidden, device=device, dtype=dtype) / hidden**0.5
    return {
        "x": torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True),
        "weight": weight.requires_grad_(),
        "target": torch.randint(0, vocab, (rows,), device=device),
    }


def _cost(dtype: torch.dtype, rows: int, hidden: int, vocab: int) -> Cost:
    """Count the gradients in the forward, which makes them; the backward scales them."""
    values = rows * hidden + vocab * hidden
    return Cost(
        forward_nbytes=2 * values * dtype.itemsize,
        backward_nbytes=2 * values * dtype.itemsize,
        forward_flops=6.0 * rows * hidden * vocab,
    )


def _cost_none(dtype: torch.dtype, rows: int, hidden: int, vocab: int) -> Cost:
    """Count no logits, which the forward does not keep; what it costs to make them again is not the least."""
    cost = _cost(dtype, rows, hidden, vocab)
    return replace(
        cost, forward_flops=cost.forward_flops / 3, backward_flops=cost.forward_flops * 2 / 3
    )


_SHAPE = {"rows": 16384, "hidden": 4096, "vocab": 128256}
_SMALL = {"rows": 7, "hidden": 16, "vocab": 83}
WORKLOADS = (
    Workload(
        "linear_cross_entropy", _inputs, linear_cross_entropy, _cost, _SHAPE, _SMALL,
        ({"vocab": 50257},),  # padded inside
    ),
    Workload(
        "linear_cross_entropy_none", _inputs,
        partial(linear_cross_entropy, reduction="none", label_smoothing=0.1, z_loss=1e-4),
        _cost_none, _SHAPE, _SMALL,
    ),
)  # fmt: skip
