"""The CPU path of Adam, AdamW, SGD and Adagrad: PyTorch's fused CPU kernels, which read every value once.

Formulas: see ``reference``. The other rules run the reference itself on the CPU.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from stoker_kernels.optim.hyper import AdamHyper, SGDHyper, SquareHyper, read
from stoker_kernels.optim.table import laid_out

Tensors = list[torch.Tensor]


def adam(
    params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, hyper: torch.Tensor
) -> None:
    """Run one step of Adam or AdamW in place."""
    h = read(AdamHyper, hyper)
    torch._foreach_add_(steps, 1.0)
    first, second = states
    fused = torch._fused_adamw_ if h.decoupled else torch._fused_adam_
    fused(
        params, list(map(laid_out, grads, params)), first, second, [], steps, lr=h.lr, beta1=1.0 - h.alpha1,
        beta2=1.0 - h.alpha2, weight_decay=h.weight_decay, eps=h.eps, amsgrad=False,
        maximize=h.sign < 0,
    )  # fmt: skip
    changed(params, first, second)


def sgd(
    params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, hyper: torch.Tensor
) -> None:
    """Run one step of SGD in place; a first step starts the momentum, so they go apart."""
    h = read(SGDHyper, hyper)
    torch._foreach_add_(steps, 1.0)
    first: dict[bool, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        first[step.item() == 1.0].append(index)
    grads = list(map(laid_out, grads, params))
    for is_first, chosen in first.items():
        p, g, *buffers = ([column[i] for i in chosen] for column in (params, grads, *states))
        torch._fused_sgd_(
            p, g, *(buffers or [[]]), lr=h.lr, weight_decay=h.weight_decay, momentum=h.momentum,
            dampening=1.0 - h.added, nesterov=bool(h.nesterov), maximize=h.sign < 0,
            is_first_step=is_first,
        )  # fmt: skip
    changed(params, *states)


def adagrad(
    params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, hyper: torch.Tensor
) -> None:
    """Run one step of Adagrad in place."""
    h = read(SquareHyper, hyper)
    torch._foreach_add_(steps, 1.0)
    torch._fused_adagrad_(
        params, list(map(laid_out, grads, params)), states[0], steps, lr=h.lr, lr_decay=h.lr_decay,
        weight_decay=h.weight_decay, eps=h.eps, maximize=h.sign < 0,
    )  # fmt: skip
    changed(params, states[0])


def changed(*columns: Tensors) -> None:
    """Tell autograd, which does not see into an op, that a saved tensor is another now."""
    for column in columns:
        torch.autograd.graph.increment_version(column)
