"""The optimizers in PyTorch, one tensor at a time: the specification of every kernel here.

Step t (from 1) with parameter p, gradient g, learning rate lr, weight decay w, everything in the compute
dtype (fp32, or fp64 for fp64 parameters):

Adam (Kingma & Ba 2015), the L2 term in the gradient: g = g + w p, then
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
AdamW (Loshchilov & Hutter 2019): no L2 term; p = p - lr w p before the step.
SGD (torch.optim.SGD): g = g + w p;  b = momentum b + (1 - dampening) g, and b = g in the first step;
    p = p - lr (b, or g + momentum b with Nesterov)
LAMB (You et al. 2020, algorithm 2): m, v as Adam's;  u = m^ / (sqrt(v^) + eps) + w p  (m^, v^ corrected)
    p = p - lr phi(|p|) / |u| * u,  phi(z) = min(max(z, low), high); the ratio is 1 where |p| or |u| is 0
LARS (You et al. 2017, algorithm 1): r = trust |p| / (|g| + w |p| + eps), 1 where |p| or |g| is 0
    b = momentum b + lr r (g + w p);  p = p - b
Adagrad (Duchi et al. 2011), Adadelta (Zeiler 2012) and RMSprop (Hinton 2012), as torch.optim has them, after
    g = g + w p:
    Adagrad: s = s + g^2;  p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
    Adadelta: v = rho v + (1 - rho) g^2;  d = sqrt(a + eps) / sqrt(v + eps) g;  p = p - lr d
        a = rho a + (1 - rho) d^2
    RMSprop: v = alpha v + (1 - alpha) g^2;  u = g / (sqrt(v) + eps);  p = p - lr u
        or with momentum: b = momentum b + u;  p = p - lr b
Norms are 2-norms over one tensor, and over all shards of a sharded one: ``trust_squares`` measures a shard,
``update`` is given the sums. eps in LARS is not the paper's; it defaults to 0. Without ``adapt`` the ratio
is 1: biases and norms are often excluded so.

The gradient is first divided by ``grad_scale`` and, to maximize, negated. With ``found_inf`` nothing
changes, the step number included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker_kernels.optim.hyper import AdamHyper, SGDHyper, SquareHyper, unpack
from stoker_kernels.primitives.philox import philox4x32
from stoker_kernels.runtime.backend import compute_dtype

STEP_BIT = 34  # of the counter: below it the number of eight elements, above it the step
Update = tuple[torch.Tensor, list[torch.Tensor]]  # the new parameter and the new states


def moments(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], h: AdamHyper
) -> list[torch.Tensor]:
    """Return Adam's m and v after this step."""
    m, v = states
    return [m + h.alpha1 * (g - m), v + h.alpha2 * (g * g - v)]


def direction(states: list[torch.Tensor], t: torch.Tensor, h: AdamHyper) -> torch.Tensor:
    """Compute m^ / (sqrt(v^) + eps)."""
    m, v = states
    correction1, correction2 = -torch.expm1(t * h.log_beta1), -torch.expm1(t * h.log_beta2)
    return m / correction1 / (v.sqrt() / correction2.sqrt() + h.eps)


def adam(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], t: torch.Tensor, h: AdamHyper
) -> Update:
    """Run Adam or AdamW."""
    states = moments(p, g + (1.0 - h.decoupled) * h.weight_decay * p, states, h)
    p = p - h.lr * h.decoupled * h.weight_decay * p
    return p - h.lr * direction(states, t, h), states


def lamb(
    p: torch.Tensor,
    g: torch.Tensor,
    states: list[torch.Tensor],
    t: torch.Tensor,
    h: AdamHyper,
    squares: torch.Tensor | None = None,
) -> Update:
    """Run LAMB; ``squares`` (3,) of gradient, parameter and direction, where p is not the whole tensor."""
    states = moments(p, g, states, h)
    u = direction(states, t, h) + h.weight_decay * p
    if squares is None:
        p_norm, u_norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(u)
    else:
        _, p_norm, u_norm = squares.to(p.dtype).sqrt().unbind()
    ratio = torch.minimum(torch.maximum(p_norm, h.low), h.high) / u_norm
    adapts = (p_norm > 0) & (u_norm > 0) & (h.adapt != 0)
    return p - h.lr * torch.where(adapts, ratio, 1.0) * u, states


def sgd(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], t: torch.Tensor, h: SGDHyper
) -> Update:
    """Run SGD; without a momentum buffer, plain gradient descent."""
    g = g + h.weight_decay * p
    if not states:
        return p - h.lr * g, []
    buffer = h.momentum * states[0] + torch.where(t == 1, 1.0, h.added) * g
    step = torch.where(h.nesterov != 0, g + h.momentum * buffer, buffer)
    return p - h.lr * step, [buffer]


def lars(
    p: torch.Tensor,
    g: torch.Tensor,
    states: list[torch.Tensor],
    t: torch.Tensor,
    h: SGDHyper,
    squares: torch.Tensor | None = None,
) -> Update:
    """Run LARS; ``squares`` (2,) of gradient and parameter, where p is not the whole tensor."""
    if squares is None:
        p_norm, g_norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(g)
    else:
        g_norm, p_norm = squares.to(p.dtype).sqrt().unbind()
    ratio = h.trust * p_norm / (g_norm + h.weight_decay * p_norm + h.eps)
    adapts = (p_norm > 0) & (g_norm > 0) & (h.adapt != 0)
    rate = h.lr * torch.where(adapts, ratio, 1.0)
    buffer = h.momentum * states[0] + rate * (g + h.weight_decay * p)
    return p - buffer, [buffer]


def adagrad(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], t: torch.Tensor, h: SquareHyper
) -> Update:
    """Run Adagrad."""
    g = g + h.weight_decay * p
    total = states[0] + g * g
    rate = h.lr / (1.0 + (t - 1.0) * h.lr_decay)
    return p - rate * g / (total.sqrt() + h.eps), [total]


def adadelta(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], t: torch.Tensor, h: SquareHyper
) -> Update:
    """Run Adadelta."""
    g = g + h.weight_decay * p
    average, moved = states
    average = average + h.added * (g * g - average)
    delta = (moved + h.eps).sqrt() / (average + h.eps).sqrt() * g
    return p - h.lr * delta, [average, moved + h.added * (delta * delta - moved)]


def rmsprop(
    p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], t: torch.Tensor, h: SquareHyper
) -> Update:
    """Run RMSprop; without a momentum buffer, the scaled gradient is the step."""
    g = g + h.weight_decay * p
    average = states[0] + h.added * (g * g - states[0])
    step = g / (average.sqrt() + h.eps)
    if len(states) == 1:
        return p - h.lr * step, [average]
    buffer = h.momentum * states[1] + step
    return p - h.lr * buffer, [average, buffer]


Rule = Callable[..., Update]
RULES: dict[str, tuple[Rule, Any]] = {
    "adam": (adam, AdamHyper),
    "sgd": (sgd, SGDHyper),
    "lamb": (lamb, AdamHyper),
    "lars": (lars, SGDHyper),
    "adagrad": (adagrad, SquareHyper),
    "adadelta": (adadelta, SquareHyper),
    "rmsprop": (rmsprop, SquareHyper),
}
TRUST = {"lamb": 3, "lars": 2}  # rules with a trust ratio, and the norms that it takes


def update(
    rule: str,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[list[torch.Tensor]],
    steps: list[torch.Tensor],
    hyper: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    seed: int | None,
    places: list[int] | None = None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one step of ``rule`` on every tensor, in place; return the gradients' square sums (T,), unscaled.

    ``states``: a list per kind of state, each as long as ``params``. ``seed`` rounds bf16 stochastically,
    together with a tensor's number in ``places`` (its place here by default). ``squares``: what
    :func:`trust_squares` returned, summed over the shards.
    """
    function, kind = RULES[rule]
    places = list(range(len(params))) if places is None else places
    sums = []
    for index, (p, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
        wide = compute_dtype(p.dtype)
        h = unpack(kind, hyper, wide)
        g = grad.to(wide)
        if grad_scale is not None:
            g = g / grad_scale.to(wide).reshape(())
        sums.append(g.square().sum())
        own = [state[index] for state in states]
        arguments = (p.to(wide), h.sign * g, [s.to(wide) for s in own], step + 1, h)
        given = () if squares is None else (squares[:, index],)
        new_p, new_states = function(*arguments, *given)
        if seed is not None and p.dtype == torch.bfloat16:
            new_p = round_stochastically(new_p, seed + places[index], step + 1)
        for old, new in zip((p, step, *own), (new_p, step + 1, *new_states), strict=True):
            if found_inf is not None:
                new = torch.where(found_inf.reshape(()) != 0, old, new.to(old.dtype))
            old.copy_(new)
    return torch.stack(sums)


def trust_squares(
    rule: str,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[list[torch.Tensor]],
    steps: list[torch.Tensor],
    hyper: torch.Tensor,
    grad_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return the squares that ``rule``'s trust ratio takes: (``TRUST[rule]``, T); changes nothing.

    Of the gradient, the parameter, and for LAMB the direction of the step to come.
    """
    kind = RULES[rule][1]
    rows = []
    for index, (p, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
        wide = compute_dtype(p.dtype)
        h = unpack(kind, hyper, wide)
        p, g = p.to(wide), grad.to(wide)
        if grad_scale is not None:
            g = g / grad_scale.to(wide).reshape(())
        row = [g, p]
        if rule == "lamb":
            after = moments(p, h.sign * g, [state[index].to(wide) for state in states], h)
            row.append(direction(after, step + 1, h) + h.weight_decay * p)
        rows.append(torch.stack([x.square().sum() for x in row]))
    return torch.stack(rows, 1)


def round_stochastically(p: torch.Tensor, seed: int, step: torch.Tensor) -> torch.Tensor:
    """Round fp32 p to the nearest bf16 above or below, each as likely as it is near; any shape, in fp32.

    Sixteen random bits are added below bf16's last place and the rest is cut off. Elements count in
    the order of memory, eight to a Philox counter; the tensor's number is part of ``seed``.
    """
    octets = -(-p.numel() // 8)
    counter = torch.arange(octets, device=p.device) + (step.to(torch.int64) << STEP_BIT)
    words = philox4x32(seed, counter, rounds=10)  # (octets, 4) of 32 bits, as Triton's own
    noise = torch.stack([words & 0xFFFF, words >> 16], -1).flatten().to(torch.int32)
    rounded = (p.view(torch.int32) + noise.as_strided(p.shape, p.stride())) & -0x10000
    return torch.where(p.isnan(), p, rounded.view(torch.float32))


def square_sums(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return sum(g^2) per tensor, (T,) in the compute dtype."""
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(grads, 2, dtype=dtype)).square()
