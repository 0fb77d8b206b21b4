"""The launches of an optimizer step: scalars, update (for trust ratios twice), sums.

One update launch per dtype signature; tensors that forbid 16-byte accesses (odd sizes, odd views) have a
launch of their own. Nothing waits for the device and nothing is built anew while addresses stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from stoker_kernels.optim.reference import TRUST
from stoker_kernels.optim.table import Table, is_dense, laid_out, table_of
from stoker_kernels.optim.triton import kernels, scalar_kernels, square_kernels, trust_kernels
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch
from stoker_kernels.tuning import Config, choose

RULES = {
    "adam": scalar_kernels.ADAM,
    "sgd": scalar_kernels.SGD,
    "lamb": scalar_kernels.LAMB,
    "lars": scalar_kernels.LARS,
    "adagrad": scalar_kernels.ADAGRAD,
    "adadelta": scalar_kernels.ADADELTA,
    "rmsprop": scalar_kernels.RMSPROP,
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
    grads: list[torch.Tensor]  # the table holds addresses only, and some of these may be copies

    def scalars(
        self,
        rule: Any,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        counted: bool = True,
    ) -> torch.Tensor:
        """Return (T, SCALARS) of the step to come, and count it if ``counted``."""
        tensors = self.table.rows.shape[0]
        scalars = self.on.new_empty((tensors, kernels.SCALARS.value), dtype=torch.float32)
        launch(
            scalar_kernels.scalars_kernel, (cdiv(tensors, TENSORS),),
            self.table.rows, self.hyper, grad_scale, found_inf, scalars, tensors,
            RULE=rule, BLOCK=TENSORS, COUNTED=counted, num_warps=2, on=self.hyper,
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

    def reduce(
        self, rule: Any, partials: torch.Tensor, scalars: torch.Tensor, kinds: int = 1
    ) -> torch.Tensor:
        """Return square sums (kinds, T), the gradients' first.

        Trust ratios go into ``scalars`` where ``rule`` has them.
        """
        sums = self.on.new_empty((kinds, self.table.rows.shape[0]), dtype=torch.float32)
        launch(
            scalar_kernels.reduce_kernel, (sums.shape[1],),
            self.table.rows, self.hyper, partials, scalars, sums, self.table.blocks,
            RULE=rule, KINDS=kinds, CHUNK=self.config["CHUNK"], WIDTH=WIDTH, num_warps=4,
            on=self.hyper,
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
    places: list[int] | None = None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``reference.update``. Parameters and states are dense, a state laid out as its parameter."""
    on = params[0]
    rounded = seed is not None and on.dtype == torch.bfloat16
    step, types, first, second = _begin(
        rule, params, grads, states, steps, hyper, places if rounded else None
    )
    scalars = step.scalars(RULES[rule], grad_scale, found_inf)
    seed = seed if rounded else 0
    rounding = {"ROUNDED": rounded}
    sums = _adapt(step, rule, scalars, types, squares) if rule in TRUST else None
    partials = step.partials(1)
    if rule == "lamb":
        no_gradient = {name: kind for name, kind in types.items() if name != "G_TYPE"}
        step.run(trust_kernels.lamb_kernel, scalars, seed, **no_gradient, **rounding)
    elif rule == "adam":
        step.run(kernels.adam_kernel, scalars, partials, seed, **types, **rounding)
    elif rule in ("sgd", "lars"):
        step.run(
            kernels.sgd_kernel,
            scalars,
            partials,
            seed,
            HAS_BUFFER=bool(states),
            **types,
            **rounding,
        )
    else:
        step.run(
            square_kernels.square_kernel, scalars, partials, seed,
            RULE=RULES[rule], HAS_SECOND=bool(second), **types, **rounding,
        )  # fmt: skip
    if sums is None:
        sums = step.reduce(scalar_kernels.SUMS_ONLY, partials, scalars)
    torch.autograd.graph.increment_version([*params, *first, *second, *steps])
    return sums[0]


def trust_squares(
    rule: str,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[list[torch.Tensor]],
    steps: list[torch.Tensor],
    hyper: torch.Tensor,
    grad_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Compute ``reference.trust_squares``."""
    step, types, *_ = _begin(rule, params, grads, states, steps, hyper, None)
    scalars = step.scalars(RULES[rule], grad_scale, None, counted=False)
    partials = _norms(step, rule, scalars, types, stored=False)
    return step.reduce(scalar_kernels.SUMS_ONLY, partials, scalars, TRUST[rule])


def _begin(
    rule: str,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[list[torch.Tensor]],
    steps: list[torch.Tensor],
    hyper: torch.Tensor,
    places: list[int] | None,
) -> tuple[_Step, dict[str, Any], list[torch.Tensor], list[torch.Tensor]]:
    """Return the step over a table of these tensors, its kernels' dtypes, and both lists of states."""
    on = params[0]
    if on.dtype not in TYPES:
        launch(None, (0,), on=on)  # raises: it names the dtypes there are
    grads = list(map(laid_out, grads, params))
    config = config_for(rule, on.dtype)
    first, second = (*states, [], [])[:2]
    table = table_of((params, grads, first, second, steps), config["CHUNK"], places)
    types = {
        "P_TYPE": TYPES[on.dtype],
        "G_TYPE": TYPES[grads[0].dtype],
        "S_TYPE": TYPES[first[0].dtype] if first else tl.float32,
    }
    return _Step(table, hyper.to(torch.float32), config, on, grads), types, first, second


def _norms(
    step: _Step, rule: str, scalars: torch.Tensor, types: dict[str, Any], *, stored: bool
) -> torch.Tensor:
    """Return the partial squares of a trust ratio; LAMB's moments are updated if ``stored``."""
    partials = step.partials(TRUST[rule])
    blocks = step.table.blocks
    if rule == "lamb":
        kernel = trust_kernels.lamb_moments_kernel
        step.run(kernel, scalars, partials, blocks, STORED=stored, **types)
    else:
        only = {name: kind for name, kind in types.items() if name != "S_TYPE"}
        step.run(trust_kernels.norms_kernel, scalars, partials, blocks, PARAMETERS=True, **only)
    return partials


def _adapt(
    step: _Step,
    rule: str,
    scalars: torch.Tensor,
    types: dict[str, Any],
    squares: torch.Tensor | None,
) -> torch.Tensor | None:
    """Put the trust ratios into ``scalars``: of the tensors here, or from all shards' ``squares``.

    Returns the square sums of what is here, if anything was read.
    """
    if squares is None:
        return step.reduce(RULES[rule], _norms(step, rule, scalars, types, stored=True), scalars)
    sums = None
    if rule == "lamb":  # its moments are still those of the step before
        partials = _norms(step, rule, scalars, types, stored=True)
        sums = step.reduce(scalar_kernels.SUMS_ONLY, partials, scalars)
    squares = squares.to(torch.float32).contiguous()
    launch(
        scalar_kernels.ratio_kernel, (squares.shape[1],),
        step.hyper, squares, scalars, RULE=RULES[rule], num_warps=1, on=step.hyper,
    )  # fmt: skip
    return sums


def square_sums(params: list[torch.Tensor], grads: list[torch.Tensor]) -> torch.Tensor:
    """Compute ``reference.square_sums``: one read of the gradients, for clipping before the update."""
    on = grads[0]
    if on.dtype not in TYPES:
        launch(None, (0,), on=on)
    grads = [g if is_dense(g) else g.contiguous() for g in grads]
    config = config_for("norms", on.dtype)
    table = table_of((params, grads, [], [], []), config["CHUNK"])
    step = _Step(table, on.new_empty(0, dtype=torch.float32), config, on, grads)
    partials = step.partials(1)
    step.run(
        trust_kernels.norms_kernel, partials, partials, table.blocks,
        P_TYPE=TYPES[on.dtype], G_TYPE=TYPES[on.dtype], PARAMETERS=False,
    )  # fmt: skip
    return step.reduce(scalar_kernels.SUMS_ONLY, partials, partials)[0]
