"""What a user would call instead of each kernel: plain PyTorch, torch.compile of it, torch's own fused op.

``PEERS`` maps a workload's name to functions that take the workload's inputs by name. ``eager`` is what
one writes in a model; ``compile`` is made of it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_kernels.workloads import Workload


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """torch's fused RMSNorm."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum, then the norm."""
    h = x + residual
    return rms_norm(h, weight), h


PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"eager": rms_norm},
    "add_rms_norm": {"eager": add_rms_norm},
}


def providers(work: Workload, device: str) -> dict[str, Callable[..., Any]]:
    """Ours first, then the peers; ``compile`` only where its code generator runs (a GPU)."""
    found: dict[str, Callable[..., Any]] = {"stoker": work.run, **PEERS.get(work.name, {})}
    if device == "cuda" and "eager" in found:
        found["compile"] = torch.compile(found["eager"])
    return found
