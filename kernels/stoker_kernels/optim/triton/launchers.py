"""The launches of an optimizer step: scalars, update (for trust ratios twice), sums.

One update launch per dtype signature; tensors that forbid 16-byte accesses (odd sizes, odd views) have a
launch of their own. Nothing waits for the device and nothing is built anew while addresses stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from stoker_kernels.optim.table import Table, is_dense, laid_out, table_of
from stoker_kernels.optim.triton import kernels, scalar_kernels, trust_kernels
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch
from stoker_kernels.tuning import Config, choose

RULES = {
    "adam": scalar_kernels.ADAM,
    "sgd": scalar_kernels.SGD,
    "lamb": scalar_kernels.LAMB,
    "lars": scalar_kernels.LARS,
}
TENSORS = 64  # to a program of scalars_kernel
WIDTH = 2048  # partials that reduce_kernel adds at a time
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def config_for(rule: str, dtype: torch.dtype) -> Config:
    """Give eight elements to each thread: 16 bytes of bf16. CHUNK bounds the partials without idling SMs.

    Beside fp32 states Adam is faster with four, and with the 64 registers that let two such programs share a
    multiprocessor (docs/perf/kernels.md).
    """
    default = {"BLOCK": 2048, "CHUNK": 8192, "num_warps": 8}
    if rule == "adam" and dtype != torch.float32:
        default |= {"num_warps": 16, "maxnreg": 64}
    return choose(f"optim_{rule}", default, candidates, dtype=dtype)


def candidates() -> list[Config]:
    """Return what an autotuner may try."""
    return [
        {"BLOCK": block, "CHUNK": block * blocks, "num_warps": block // 256, "maxnreg": 64}
        for block in (1024, 2048, 4096)
        for blocks in (1, 4, 16)
    ]


@dataclass(frozen=True, slots=True)
class _Step:
    """The launches of one step over the tensors of one table."""

    table: Table
    hyper: torch.Tensor  # fp32
    config: Config
    on: torch.Tensor

    def scalars(
        self, rule: Any, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> torch.Tensor:
        """Count the step; (T, SCALARS)."""
        tensors = self.table.rows.shape[0]
        scalars = self.on.new_empty((tensors, kernels.SCALARS.value), dtype=torch.float32)
        launch(
            scalar_kernels.scalars_kernel, (cdiv(tensors, TENSORS),),
            self.table.rows, self.hyper, grad_scale, found_inf, scalars, tensors,
            RULE=rule, BLOCK=TENSORS, num_warps=2, on=self.hyper,
        )  # fmt: skip
        return scalars

    def partials(self, kinds: int) -> torch.Tensor:
        return self.on.new_empty((kinds, self.table.blocks), dtype=torch.float32)

    def run(self, kernel: Any, scalars: torch.Tensor, *args: Any, **constants: Any) -> None:
        """Launch one program per block, aligned tensors and the others apart."""
        for part in self.table.parts:
            launch(
                kernel, (part.blocks,), self.table.rows, self.table.tensor_of_block, scalars,
                part.first, *args, ALIGNED=part.aligned, on=self.on, **constants, **self.config,
            )  # fmt: skip

    def reduce(self, rule: Any, partials: torch.Tensor, scalars: torch.Tensor) -> torch.Tensor:
        """Return the gradients' square sums (T,); trust ratios into ``scalars`` where ``rule`` has them."""
        sums = self.on.new_empty(self.table.rows.shape[0], dtype=torch.float32)
        launch(
            scalar_kernels.reduce_kernel, (sums.numel(),),
            self.table.rows, self.hyper, partials, scalars, sums, self.table.blocks,
            RULE=rule, CHUNK=self.config["CHUNK"], WIDTH=WIDTH, num_warps=4, on=self.hyper,
        )  # fmt: skip
        return sums


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
) -> torch.Tensor:
    """Compute ``reference.update``. Parameters and states are dense, a state laid out as its parameter."""
    on = params[0]
    if on.dtype not in TYPES:
        launch(None, (0,), on=on)  # raises: it names the dtypes there are
    grads = list(map(laid_out, grads, params))
    config = config_for(rule, on.dtype)
    first, second = (*states, [], [])[:2]
    table = table_of((params, grads, first, second, steps), config["CHUNK"])
    step = _Step(table, hyper.to(torch.float32), config, on)
    scalars = step.scalars(RULES[rule], grad_scale, found_inf)
    rounded = seed is not None and on.dtype == torch.bfloat16
    seed = seed if rounded else 0
    p_type, g_type = TYPES[on.dtype], TYPES[grads[0].dtype]
    s_type = TYPES[first[0].dtype] if first else tl.float32
    types = {"P_TYPE": p_type, "G_TYPE": g_type, "S_TYPE": s_type}
    if rule == "lamb":
        partials = step.partials(3)
        step.run(trust_kernels.lamb_moments_kernel, scalars, partials, table.blocks, **types)
        sums = step.reduce(RULES[rule], partials, scalars)
        step.run(
            trust_kernels.lamb_kernel, scalars, seed, P_TYPE=p_type, S_TYPE=s_type, ROUNDED=rounded
        )
    elif rule == "lars":
        partials = step.partials(2)
        step.run(
            trust_kernels.norms_kernel, scalars, partials, table.blocks,
            P_TYPE=p_type, G_TYPE=g_type, PARAMETERS=True,
        )  # fmt: skip
        sums = step.reduce(RULES[rule], partials, scalars)
        step.run(
            kernels.sgd_kernel, scalars, partials, seed, HAS_BUFFER=True, ROUNDED=rounded, **types
        )
    else:
        partials = step.partials(1)
        if rule == "adam":
            step.run(kernels.adam_kernel, scalars, partials, seed, ROUNDED=rounded, **types)
        else:
            step.run(
                kernels.sgd_kernel, scalars, partials, seed,
                HAS_BUFFER=bool(states), ROUNDED=rounded, **types,
            )  # fmt: skip
        sums = step.reduce(scalar_kernels.SUMS_ONLY, partials, scalars)
    torch.autograd.graph.increment_version([*params, *first, *second, *steps])
    return sums


def square_sums(params: list[torch.Tensor], grads: list[torch.Tensor]) -> torch.Tensor:
    """Compute ``reference.square_sums``: one read of the gradients, for clipping before the update."""
    on = grads[0]
    if on.dtype not in TYPES:
        launch(None, (0,), on=on)
    grads = [g if is_dense(g) else g.contiguous() for g in grads]
    config = config_for("norms", on.dtype)
    table = table_of((params, grads, [], [], []), config["CHUNK"])
    step = _Step(table, on.new_empty(0, dtype=torch.float32), config, on)
    partials = step.partials(1)
    step.run(
        trust_kernels.norms_kernel, partials, partials, table.blocks,
        P_TYPE=TYPES[on.dtype], G_TYPE=TYPES[on.dtype], PARAMETERS=False,
    )  # fmt: skip
    return step.reduce(scalar_kernels.SUMS_ONLY, partials, partials)
