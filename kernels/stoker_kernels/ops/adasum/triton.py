"""Adasum of two gradients on the GPU: one pass for the dots, one for the combination, no atomics.

Each program of the first pass sums its share of the three dots in fp32; the programs' sums, a few hundred,
are added in fp64. Bytes moved per value of b bytes: 2b + 3b, 20 in fp32. Formula: see ``reference``;
norms whose square leaves fp32's range (1e-22 .. 1e19) count as zero or come out as not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.adasum import reference
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

PROGRAMS_PER_SM = 4
DEFAULT: Config = {"TILE": 2048, "num_warps": 8}
CANDIDATES: list[Config] = [
    {"TILE": tile, "num_warps": warps} for tile in (1024, 2048, 4096) for warps in (4, 8)
]


@triton.jit
def adasum_dots_kernel(a_ptr, b_ptr, dots_ptr, n, TILE: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, TILE)
    ab = tl.zeros([TILE], tl.float32)
    aa = tl.zeros([TILE], tl.float32)
    bb = tl.zeros([TILE], tl.float32)
    for tile in range(program, tl.cdiv(n, TILE), programs):
        first = tl.cast(tile, tl.int64) * TILE
        inside = place < tl.minimum(n - first, TILE).to(tl.int32)
        a = tl.load(a_ptr + first + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + first + place, mask=inside, other=0.0).to(tl.float32)
        ab += a * b
        aa += a * a
        bb += b * b
    tl.store(dots_ptr + program * 3, tl.sum(ab))
    tl.store(dots_ptr + program * 3 + 1, tl.sum(aa))
    tl.store(dots_ptr + program * 3 + 2, tl.sum(bb))


@triton.jit
def adasum_combine_kernel(a_ptr, b_ptr, scale_ptr, out_ptr, n, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    place = tl.arange(0, TILE)
    inside = place < tl.minimum(n - first, TILE).to(tl.int32)
    a = tl.load(a_ptr + first + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + first + place, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(scale_ptr) * a + tl.load(scale_ptr + 1) * b
    tl.store(out_ptr + first + place, mixed.to(out_ptr.dtype.element_ty), mask=inside)


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``reference.pair`` on the GPU; a and b are contiguous."""
    n = a.numel()
    dots_config = choose("adasum_dots", DEFAULT, lambda: CANDIDATES, dtype=a.dtype)
    limit = PROGRAMS_PER_SM * device_of(adasum_dots_kernel, a).multiprocessors
    programs = min(cdiv(n, dots_config["TILE"]), limit)
    dots = a.new_empty((programs, 3), dtype=torch.float32)
    launch(adasum_dots_kernel, (programs,), a, b, dots, n, on=a, **dots_config)
    scale = reference.coefficients(*dots.double().sum(0).unbind()).float()
    out = a.new_empty(n)
    config = choose("adasum_combine", DEFAULT, lambda: CANDIDATES, dtype=a.dtype)
    launch(
        adasum_combine_kernel, (cdiv(n, config["TILE"]),), a, b, scale, out, n,
        on=a, **config,
    )  # fmt: skip
    return out
