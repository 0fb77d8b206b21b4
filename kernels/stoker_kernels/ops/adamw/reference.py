"""AdamW in PyTorch: the specification (one tensor) and the CPU path (``torch._foreach_*``).

Step t with gradient g (Loshchilov & Hutter 2019, decoupled weight decay):
    p *= 1 - lr * weight_decay;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
Arithmetic is in the moments' dtype, fp32 or wider.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """The scalars of one step, the bias corrections folded in."""

    decay: float  # 1 - lr * weight_decay
    step_size: float  # lr / (1 - b1^t)
    beta1: float
    beta2: float
    correction: float  # sqrt(1 - b2^t)
    eps: float


def step_scalars(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Step:
    """Fold step number ``step`` (from 1) and the hyperparameters into the kernel's scalars."""
    return Step(
        decay=1.0 - lr * weight_decay,
        step_size=lr / (1.0 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        correction=math.sqrt(1.0 - beta2**step),
        eps=eps,
    )


def adamw_one(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Step) -> None:
    """Update one parameter and its moments in place. The formula above, line by line."""
    g = g.to(m.dtype)
    m.copy_(s.beta1 * m + (1.0 - s.beta1) * g)
    v.copy_(s.beta2 * v + (1.0 - s.beta2) * g * g)
    p.copy_(s.decay * p.to(m.dtype) - s.step_size * m / (v.sqrt() / s.correction + s.eps))


def adamw_foreach(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    s: Step,
) -> None:
    """``adamw_one`` for many fp32/fp64 tensors at a time, all of one dtype."""
    torch._foreach_lerp_(exp_avgs, grads, 1.0 - s.beta1)
    torch._foreach_mul_(exp_avg_sqs, s.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - s.beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, s.correction)
    torch._foreach_add_(denominators, s.eps)
    if s.decay != 1.0:
        torch._foreach_mul_(params, s.decay)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -s.step_size)


def square_sum(grads: list[torch.Tensor]) -> torch.Tensor:
    """Sum over all tensors of sum(g^2), a scalar in the compute dtype."""
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch._foreach_norm(grads, 2, dtype=dtype)
    return torch.stack(norms).square().sum()
