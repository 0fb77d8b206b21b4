"""Square sums |g|^2 of gradients by parameter group, plain or as Adam sees them.

Of the combined gradient an optimizer of ours has emitted them already; these functions are for the
others: a replica's own gradient before the exchange, or any optimizer of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stoker_kernels.runtime.backend import compute_dtype


def square_sums(
    groups: Iterable[Sequence[torch.Tensor]],
    denominators: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return one |g|^2 for each group of parameters: (groups,) float64 on their device.

    A parameter counts by its ``.grad`` (none: 0). With ``denominators`` (:func:`adam_denominators`) the
    gradient is divided by them first. Reads each gradient once and does not wait for the device.
    Raises ``ValueError`` when there is no parameter at all.
    """
    sums, device = [], None
    for group in groups:
        parameters = [p for p in group if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        device = group[0].device if device is None and group else device
        if denominators is not None and grads:
            grads = list(torch._foreach_div(grads, [denominators[p] for p in parameters]))
        sums.append(_square_sum(grads))
    if device is None:
        raise ValueError("square_sums: there is no parameter: pass lists of parameters, by group")
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero if s is None else s.to(device) for s in sums])


def optimizer_square_sums(optimizer: Any) -> torch.Tensor:
    """Return what an optimizer of ours measured in its last step, by parameter group: (groups,) float64.

    Of the gradients as they were at ``step()``: averaged over the replicas, before clipping. Raises
    ``ValueError`` before the first step.
    """
    sums = optimizer.grad_square_sums
    if sums is None:
        raise ValueError("optimizer_square_sums: the optimizer has taken no step yet")
    parts = sums.double().split([len(group["params"]) for group in optimizer.param_groups])
    return torch.stack([part.sum() for part in parts])


def _square_sum(grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Compute sum |g|^2, squared in float64: a norm of 1e-20 has no square in float32."""
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        same = [g for g in grads if g.dtype == dtype]
        norms += torch._foreach_norm(same, 2, dtype=compute_dtype(dtype))
    if not norms:
        return None
    return torch.stack([n.double() for n in norms]).square().sum()


@torch.no_grad()
def adam_denominators(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return what Adam divides each gradient by, sqrt(v / (1 - beta2^t)) + eps, by parameter.

    Adam's progress depends on g / denominator rather than g, so its noise scale is of that (as in
    Pollux, Qiao et al., OSDI 2021). Ones for a parameter without state yet. Take them once per step and
    use them for the small and the big batch alike. Works with torch's Adam and AdamW and with ours; a
    step count on the device stays there.
    """
    denominators: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        begun = [p for p in group["params"] if optimizer.state.get(p)]
        for p in group["params"]:
            if not optimizer.state.get(p):
                denominators[p] = torch.ones_like(p, dtype=compute_dtype(p.dtype))
        if not begun:
            continue
        name = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        roots = list(torch._foreach_sqrt([optimizer.state[p][name] for p in begun]))
        steps = [optimizer.state[p]["step"] for p in begun]
        torch._foreach_mul_(roots, _root_corrections(steps, group["betas"][1]))
        torch._foreach_add_(roots, group["eps"])
        denominators.update(zip(begun, roots, strict=True))
    return denominators


def _root_corrections(steps: Sequence[Any], beta2: float) -> Any:
    """Return 1 / sqrt(1 - beta2^t) for each step count: numbers, or 0-dim tensors if one is on a device.

    1 before a parameter's first real step, as after a skipped one, when v is 0 as the correction is.
    """
    if all(not isinstance(step, torch.Tensor) or step.is_cpu for step in steps):
        numbers = [float(step) for step in steps]
        known = {t: (1.0 - beta2**t) ** -0.5 if t > 0 else 1.0 for t in set(numbers)}
        return [known[t] for t in numbers]
    device = next(step.device for step in steps if isinstance(step, torch.Tensor))
    counts = torch.stack([torch.as_tensor(step, dtype=torch.float64).to(device) for step in steps])
    corrections = 1.0 - torch.pow(beta2, counts)
    return torch.where(corrections > 0, corrections, 1.0).rsqrt().unbind()
