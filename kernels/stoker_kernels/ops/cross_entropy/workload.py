"""Cross-entropy over a large vocabulary: plain, and with label smoothing and z-loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.ops.cross_entropy.autograd import cross_entropy
from stoker_kernels.workloads import Cost, Workload


def _inputs(
    device: torch.device | str, dtype: torch.dtype, rows: int, vocab: int
) -> dict[str, Any]:
    return {
        "logits": torch.randn(rows, vocab, device=device, dtype=dtype, requires_grad=True),
        "target": torch.randint(0, vocab, (rows,), device=device),
    }


def _cost(dtype: torch.dtype, rows: int, vocab: int) -> Cost:
    nbytes = rows * vocab * dtype.itemsize
    return Cost(forward_nbytes=nbytes, backward_nbytes=2 * nbytes)


_SHAPE = {"rows": 8192, "vocab": 128256}
_SMALL = {"rows": 5, "vocab": 83}
# GPT-2's padded vocabulary, bytes, and so few rows that each is split.
_VARIANTS = ({"vocab": 50304}, {"vocab": 256}, {"rows": 32})
WORKLOADS = (
    Workload("cross_entropy", _inputs, cross_entropy, _cost, _SHAPE, _SMALL, _VARIANTS),
    Workload(
        "cross_entropy_smoothed", _inputs,
        partial(cross_entropy, label_smoothing=0.1, z_loss=1e-4), _cost, _SHAPE, _SMALL,
        ({"rows": 32},),
    ),
)  # fmt: skip
