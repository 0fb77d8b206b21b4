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
        beta2, eps = group["betas"][1], group["eps"]
        for p in group["params"]:
            state = optimizer.state.get(p)
            if not state:
                denominators[p] = torch.ones_like(p, dtype=compute_dtype(p.dtype))
                continue
            v = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
            step = torch.as_tensor(state["step"], dtype=torch.float64)
            correction = 1.0 - torch.pow(beta2, step)  # 0-dim: a CPU scalar joins any device
            # Before its first real step, as after a skipped one, v and the correction are both 0.
            safe = torch.where(correction > 0, correction, 1.0).to(v.dtype)
            denominators[p] = (v / safe).sqrt_().add_(eps)
    return denominators
