"""What a user would call instead of each kernel: plain PyTorch, torch.compile of it, torch's own fused op,
and what packages of others have.

``PEERS`` maps a workload's name to functions that take the workload's inputs by name. ``eager`` is what
one writes in a model; ``compile`` is made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kernels.peers import gemm, model, training
from benchmarks.kernels.peers.packages import package_peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_kernels.workloads import Workload

PEERS = {**model.PEERS, **gemm.PEERS, **training.PEERS}


def providers(work: Workload, device: str) -> dict[str, Callable[..., Any]]:
    """Return ours first, then the peers; those that generate or hold CUDA code only on a GPU."""
    found: dict[str, Callable[..., Any]] = {"stoker": work.run, **PEERS.get(work.name, {})}
    if device == "cuda" and "eager" in found:
        found["compile"] = torch.compile(found["eager"])
        found |= package_peers().get(work.name, {})
    return found
