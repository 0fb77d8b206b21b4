"""One case: a provider's forward, backward or both at one size, against the roofline of its workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.kernels.timing import Ceilings, Timing, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker_kernels.workloads import Workload


@dataclass(frozen=True, slots=True)
class Result:
    """What one provider took. ``roofline`` is the least time over the measured one, of 1."""

    op: str
    sizes: str
    dtype: str
    mode: str
    provider: str
    timing: Timing
    gbytes_per_s: float
    tflops_per_s: float
    roofline: float


def run_case(
    work: Workload,
    provider: str,
    function: Callable[..., Any],
    device: str,
    dtype: torch.dtype,
    limits: Ceilings,
    **sizes: int,
) -> Iterator[Result]:
    """Time ``function`` on the inputs of ``work`` in each mode that it has."""
    sized = work.sized(**sizes)
    cost = work.cost(dtype, **sized)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = work.inputs(device, dtype, **sized)
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]

    def forward() -> Any:
        return function(**inputs)

    modes: dict[str, tuple[Callable[[], Any], float, float]] = {}
    if work.differentiable:
        modes["forward"] = forward, cost.forward_nbytes, cost.forward_flops
        outputs = [
            t for t in tree_leaves(forward()) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        upstream = [torch.randn_like(t) for t in outputs]

        def backward() -> None:
            torch.autograd.backward(outputs, upstream, retain_graph=True)

        def full() -> None:
            made = [t for t in tree_leaves(forward()) if isinstance(t, torch.Tensor)]
            torch.autograd.backward([t for t in made if t.requires_grad], upstream)

        modes["backward"] = backward, cost.backward_nbytes, cost.backward_flops
        modes["full"] = (
            full, cost.forward_nbytes + cost.backward_nbytes, cost.forward_flops + cost.backward_flops
        )  # fmt: skip
    else:
        modes["step"] = forward, cost.forward_nbytes, cost.forward_flops

    def clear() -> None:
        for leaf in leaves:
            if work.differentiable:
                leaf.grad = None

    for mode, (call, nbytes, flops) in modes.items():
        timing = timed(call, device, clear)
        seconds = timing.median_ms / 1e3
        least = max(nbytes / limits.copy_nbytes_per_s, flops / limits.matmul_flops_per_s)
        yield Result(
            work.name, " ".join(f"{k}={v}" for k, v in sized.items()),
            str(dtype).removeprefix("torch."), mode, provider, timing,
            nbytes / seconds / 1e9, flops / seconds / 1e12, least / seconds,
        )  # fmt: skip
