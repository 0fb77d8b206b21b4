"""Peak bytes of tensors alive during a call, counted by allocation: needs no GPU, and no memory on meta.

As a script it prints, as JSON, the peaks of one training step of a language model's head for the GPU path,
run dry on meta tensors: {"eager": ..., "fused": ...}, inputs included.
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker_kernels import linear_cross_entropy
from stoker_kernels.ops.linear_cross_entropy import autograd

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, HIDDEN, VOCAB = 32768, 4096, 128256


class PeakBytes(TorchDispatchMode):
    """Adds every new storage, and takes it off when it dies; ``peak`` is the highest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)
            self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "stoker":  # look inside our op
            with self:
                return autograd._call(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


def peak_of(
    loss_of: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> tuple[int, list[torch.Tensor]]:
    """Peak bytes of a forward and backward, inputs included, and the gradients."""
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    with PeakBytes() as mode:
        for tensor in inputs:
            mode.see(tensor)
        loss_of(*inputs).backward()
    return mode.peak, [t.grad for t in inputs if t.grad is not None]


def eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def main() -> None:
    from stoker_kernels import aot

    x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="meta")
    target = torch.empty(ROWS, dtype=torch.int64, device="meta")
    with aot.compiling(90):
        fused, _ = peak_of(linear_cross_entropy, x, weight, target)
    json.dump({"eager": peak_of(eager, x, weight, target)[0], "fused": fused}, sys.stdout)


if __name__ == "__main__":
    main()
