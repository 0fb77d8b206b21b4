"""Peers of the optimizer step and of gradient messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from stoker_kernels.runtime.backend import BACKEND_VARIABLE
from stoker_kernels.workloads import workload

Functions = dict[str, Callable[..., Any]]


class _Step:
    """One step of a torch optimizer, kept from call to call as ours is."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.make = partial(make, **options)
        self.made = WeakTensorKeyDictionary()  # by identity: == of tensors is elementwise

    def __call__(self, params: list[Tensor], grads: list[Tensor], optimizer: Any) -> list[Tensor]:
        """Return the parameters after the step; ``optimizer`` is ours, and not used."""
        theirs = self.made.get(params[0])
        if theirs is None:
            theirs = self.make(params)
            self.made[params[0]] = theirs
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        theirs.step()
        return [p.detach() for p in params]


def _optimizers(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Functions:
    return {
        "foreach": _Step(make, foreach=True, **options),
        "fused": _Step(make, fused=True, **options),
    }


def onebit_compress(gradient: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Store signs as bytes in plain PyTorch: it has no packed bits."""
    u = (gradient + error).view(-1, 1024)
    scales = u.abs().mean(1)
    positive = u >= 0
    error.copy_((u - torch.where(positive, scales[:, None], -scales[:, None])).view(-1))
    return positive, scales


def onebit_decompress(words: Tensor, scales: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    lanes = torch.arange(32, dtype=torch.int32, device=words.device)
    signs = ((words[:, :, None] >> lanes) & 1).flatten(1)[:, :n] * 2 - 1
    each = scales.repeat_interleave(1024, 1)[:, :n]
    return (signs * each).mean(0).to(dtype)


def topk_compress(gradient: Tensor, memory: Tensor, k: int) -> tuple[Tensor, Tensor]:
    memory += gradient
    index = memory.abs().topk(k, sorted=False).indices
    values = memory[index]
    memory[index] = 0
    return values, index


def topk_compress_momentum(
    gradient: Tensor, memory: Tensor, k: int, velocity: Tensor, momentum: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    velocity.mul_(momentum).add_(gradient * scale)
    values, index = topk_compress(velocity, memory, k)
    velocity[index] = 0
    return values, index


def above_compress(memory: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    index = (memory.abs() >= threshold).nonzero().squeeze(1)[:capacity]
    values = memory[index]
    memory[index] = 0
    return F.pad(values, (0, capacity - len(values))), F.pad(index, (0, capacity - len(index)))


def adasum(gradients: list[Tensor]) -> Tensor:
    a, b = (g.float() for g in gradients)
    dot, a2, b2 = a.dot(b), a.dot(a), b.dot(b)
    return ((1 - dot / (2 * a2)) * a + (1 - dot / (2 * b2)) * b).to(gradients[0].dtype)


def _reference(name: str) -> Callable[..., Any]:
    """Run our own reference in plain PyTorch, where torch has no such thing."""

    def run(**inputs: Any) -> Any:
        before = os.environ.get(BACKEND_VARIABLE)
        os.environ[BACKEND_VARIABLE] = "reference"
        try:
            return workload(name).run(**inputs)
        finally:
            if before is None:
                del os.environ[BACKEND_VARIABLE]
            else:
                os.environ[BACKEND_VARIABLE] = before

    return run


PEERS: dict[str, Functions] = {
    "adamw": _optimizers(torch.optim.AdamW),
    "adamw_stochastic": {"reference": _reference("adamw_stochastic")},
    "adam": _optimizers(torch.optim.Adam, weight_decay=0.1),
    "sgd": _optimizers(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": {"foreach": _Step(torch.optim.Adagrad, foreach=True)},  # fused: on the CPU alone
    "adadelta": {"foreach": _Step(torch.optim.Adadelta, foreach=True)},  # torch has none fused
    "rmsprop": {"foreach": _Step(torch.optim.RMSprop, momentum=0.9, foreach=True)},
    "lamb": {"reference": _reference("lamb")},
    "lars": {"reference": _reference("lars")},
    "onebit_compress": {"eager": onebit_compress},
    "onebit_decompress": {"eager": onebit_decompress},
    "topk_compress": {"eager": topk_compress},
    "topk_compress_momentum": {"eager": topk_compress_momentum},
    "above_compress": {"eager": above_compress},
    "adasum": {"eager": adasum},
}
