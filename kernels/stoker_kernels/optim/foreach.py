"""The CPU path of Adam, AdamW and SGD: ``torch._foreach_*`` over many tensors of one dtype.

Formulas: see ``reference``. LAMB and LARS run the reference itself on the CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from stoker_kernels.optim.hyper import AdamHyper, SGDHyper, read

Tensors = list[torch.Tensor]
Many = list[torch.Tensor] | tuple[torch.Tensor, ...]


def by_step(steps: Tensors) -> dict[float, list[int]]:
    """The tensors' numbers by the step that they take now; advances the step tensors."""
    torch._foreach_add_(steps, 1.0)
    groups: dict[float, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        groups[step.item()].append(index)
    return groups


def adam(
    params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, hyper: torch.Tensor
) -> None:
    """One step of Adam or AdamW in place."""
    h = read(AdamHyper, hyper)
    for step, chosen in by_step(steps).items():
        p, own, m, v = ([column[i] for i in chosen] for column in (params, grads, *states))
        g = prepared(p, own, h.sign, 0.0 if h.decoupled else h.weight_decay)
        correction1, correction2 = -math.expm1(step * h.log_beta1), -math.expm1(step * h.log_beta2)
        torch._foreach_lerp_(m, g, h.alpha1)
        torch._foreach_mul_(v, 1.0 - h.alpha2)
        torch._foreach_addcmul_(v, g, g, h.alpha2)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, math.sqrt(correction2))
        torch._foreach_add_(denominators, h.eps)
        if h.decoupled and h.lr * h.weight_decay:
            torch._foreach_mul_(p, 1.0 - h.lr * h.weight_decay)
        torch._foreach_addcdiv_(p, m, denominators, -h.lr / correction1)


def sgd(
    params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, hyper: torch.Tensor
) -> None:
    """One step of SGD in place."""
    h = read(SGDHyper, hyper)
    for step, chosen in by_step(steps).items():
        p, own, *buffers = ([column[i] for i in chosen] for column in (params, grads, *states))
        g: Many = prepared(p, own, h.sign, h.weight_decay)
        for buffer in buffers:
            torch._foreach_mul_(buffer, h.momentum)
            torch._foreach_add_(buffer, g, alpha=1.0 if step == 1 else h.added)
            g = torch._foreach_add(g, buffer, alpha=h.momentum) if h.nesterov else buffer
        torch._foreach_add_(p, g, alpha=-h.lr)


def prepared(params: Many, grads: Many, sign: float, decay: float) -> Many:
    """sign * g + decay * p; ``grads`` themselves where that is the same."""
    if sign != 1.0:
        grads = torch._foreach_neg(grads)
    return torch._foreach_add(grads, params, alpha=decay) if decay else grads
