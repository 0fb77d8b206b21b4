"""Sparse messages on the GPU, in two passes; no float atomics, so results repeat bit for bit.

1. ``accumulate``: gradient into memory (and velocity), and a histogram of the magnitudes per program.
2. ``select``: each program knows from the histograms how many values the programs before it send, so it
   writes its own to their places and zeroes them in the memory.
Both walk the same contiguous spans. Bytes moved per value: b + 8 to accumulate a gradient of b bytes
(b + 16 with a velocity), 4 to select, and what is sent: 16 in fp32 where the bound with a second
read of gradient and memory would be 20. Formulas and order: see ``reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.sparsify.reference import (
    BINS,
    COARSE_SHIFT,
    FINE_BINS,
    FINE_EXTRA,
    FINE_SHIFT,
    LARGEST_BITS,
    bin_of_kth,
    edge_of,
    magnitude_bits,
    window,
)
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

PROGRAMS_PER_SM = 4
ACCUMULATE: Config = {"TILE": 4096, "num_warps": 8}
SELECT: Config = {"TILE": 4096, "num_warps": 8}
CANDIDATES: list[Config] = [
    {"TILE": tile, "num_warps": warps} for tile in (2048, 4096, 8192) for warps in (4, 8)
]
SELECT_CANDIDATES = [
    config for config in CANDIDATES if config["TILE"] > 2048
]  # spilled with 8 warps


INFINITY = tl.constexpr(2 * 0x7F800000)  # as doubled_bits_of
LARGEST = tl.constexpr(2 * LARGEST_BITS)
NOTHING = tl.constexpr(2**32 - 1)


@triton.jit
def bits_of(value):
    """|value| as the bits of an fp32, at most LARGEST_BITS."""
    return tl.minimum(value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)


@triton.jit(do_not_specialize=["momentum"])
def accumulate_kernel(
    gradient_ptr, memory_ptr, velocity_ptr, scale_ptr, base_ptr, counts_ptr, n, span, momentum,
    HAS_VELOCITY: tl.constexpr, HAS_SCALE: tl.constexpr,
    BINS: tl.constexpr, FINE_BINS: tl.constexpr, FINE_EXTRA: tl.constexpr,
    FINE_SHIFT: tl.constexpr, COARSE_SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    counts = tl.zeros([BINS], dtype=tl.int32)
    base = tl.load(base_ptr)
    end = base + (FINE_BINS << FINE_SHIFT)
    for start in range(0, span, TILE):
        first = program * span + start  # int64: more than 2^31 bytes, and n may be next to 2^31
        inside = lane < tl.minimum(n - first, TILE).to(tl.int32)  # [TILE]
        update = tl.load(gradient_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            update *= tl.load(scale_ptr)
        if HAS_VELOCITY:
            update += momentum * tl.load(velocity_ptr + first + lane, mask=inside, other=0.0)
            tl.store(velocity_ptr + first + lane, update, mask=inside)
        memory = tl.load(memory_ptr + first + lane, mask=inside, other=0.0) + update
        tl.store(memory_ptr + first + lane, memory, mask=inside)
        bits = bits_of(memory)
        fine = (base >> COARSE_SHIFT) + ((bits - base) >> FINE_SHIFT)
        coarse = (bits >> COARSE_SHIFT) + tl.where(bits < base, 0, FINE_EXTRA)
        counts += tl.histogram(
            tl.where((bits >= base) & (bits < end), fine, coarse), BINS, mask=inside
        )
    tl.store(counts_ptr + program * BINS + tl.arange(0, BINS), counts)


@triton.jit
def count_kernel(memory_ptr, threshold_ptr, counts_ptr, n, span, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    low = bits_of(tl.load(threshold_ptr))
    counts = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, span, TILE):
        first = program * span + start  # int64: more than 2^31 bytes, and n may be next to 2^31
        inside = lane < tl.minimum(n - first, TILE).to(tl.int32)  # [TILE]
        bits = bits_of(tl.load(memory_ptr + first + lane, mask=inside, other=0.0))
        counts += (inside & (bits >= low)).to(tl.int32)
    tl.store(counts_ptr + program, tl.sum(counts))


@triton.jit
def doubled_bits_of(value):
    """Twice the bits of |value|: a shift takes the sign away, and no bits reach NOTHING."""
    return value.to(tl.uint32, bitcast=True) << 1


@triton.jit
def _marks(four, low, high, FIRST: tl.constexpr):
    """Mark what each row of [N, 4] sends -> [N]: bit FIRST + i of those from high on, 16 more from low on."""
    doubled = doubled_bits_of(four)
    bit = 1 << (FIRST + tl.arange(0, 4))[None, :]  # [1, 4]
    marks = tl.where(doubled >= high, bit, tl.where(doubled >= low, bit << 16, 0))
    return tl.sum(marks, 1)  # of four values of one thread


@triton.jit
def _counts(marks):
    """Count the bits of the lower byte of each half of [N]: above | equal << 16."""
    counts = marks - ((marks >> 1) & 0x00550055)  # of pairs of bits, then of fours, then of eights
    counts = (counts & 0x00330033) + ((counts >> 2) & 0x00330033)
    return (counts + (counts >> 4)) & 0x000F000F


@triton.jit
def _select_tile(
    memory_ptr, velocity_ptr, values_ptr, indices_ptr, first, size, low, high, next_above, next_equal, k,
    MASK_VELOCITY: tl.constexpr, IS_FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Send from the values first .. first + size -> the next places above and equal.

    A thread marks eight neighbours in one word, so a scan over eighths of the tile gives their places. Of
    most words nothing is marked: what is, is read again and sent one a word at a time.
    """
    memory_ptr += first
    velocity_ptr += first
    eight = tl.arange(0, TILE // 8) * 8  # [N]
    lane = eight[:, None] + tl.arange(0, 4)[None, :]  # [N, 4]: 16 bytes a thread
    if IS_FULL:
        left, right = tl.load(memory_ptr + lane), tl.load(memory_ptr + lane + 4)
    else:
        left = tl.load(memory_ptr + lane, mask=lane < size, other=0.0)
        right = tl.load(memory_ptr + lane + 4, mask=lane + 4 < size, other=0.0)
    marks = _marks(left, low, high, 0) | _marks(right, low, high, 4)
    if not IS_FULL:  # zeros are sent where low is 0
        inside = tl.minimum(tl.maximum(size - eight, 0), 8)
        marks &= ((1 << inside) - 1) * 0x00010001
    counts = _counts(marks)
    before = tl.cumsum(counts, 0) - counts
    above_place = next_above + (before & 0xFFFF)
    equal_place = next_equal + (before >> 16)
    unsent = (marks | (marks >> 16)) & 0xFF
    for _ in range(tl.max((counts + (counts >> 16)) & 0xFFFF)):
        bit = unsent & -unsent  # the lowest, 0 if none is left
        at = eight + (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its logarithm
        is_above = (marks & bit) != 0
        place = tl.where(is_above, above_place, equal_place)
        taken = (bit != 0) & (place < k)
        memory = tl.load(memory_ptr + at, mask=bit != 0, other=0.0)
        tl.store(values_ptr + place, memory, mask=taken)
        tl.store(indices_ptr + place, first.to(tl.int32) + at, mask=taken)
        gone = taken | (doubled_bits_of(memory) >= INFINITY)  # even where it does not fit
        tl.store(memory_ptr + at, 0.0, mask=gone)
        if MASK_VELOCITY:
            tl.store(velocity_ptr + at, 0.0, mask=gone)
        above_place = tl.where(is_above, above_place + 1, above_place)
        equal_place = tl.where(is_above, equal_place, equal_place + 1)
        unsent ^= bit
    total = tl.sum(counts)
    return next_above + (total & 0xFFFF), next_equal + (total >> 16)


@triton.jit(do_not_specialize=["k"])
def select_kernel(
    memory_ptr, velocity_ptr, bounds_ptr, first_above_ptr, first_equal_ptr, values_ptr, indices_ptr,
    n, span, k, MASK_VELOCITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sends every value of bits >= bounds[1], and those >= bounds[0] to the places left below k.

    ``first_above`` and ``first_equal`` (programs,): the first place of each program's values.
    """
    program = tl.program_id(0).to(tl.int64)
    low, high = tl.load(bounds_ptr).to(tl.uint32) * 2, tl.load(bounds_ptr + 1).to(tl.uint32) * 2
    high = tl.where(high > LARGEST, NOTHING, high)
    next_above = tl.load(first_above_ptr + program)
    next_equal = tl.load(first_equal_ptr + program)
    first = program * span  # int64: more than 2^31 bytes, and n may be next to 2^31
    size = tl.minimum(n - first, span).to(tl.int32)
    whole = size // TILE * TILE
    for start in range(0, whole, TILE):
        next_above, next_equal = _select_tile(
            memory_ptr, velocity_ptr, values_ptr, indices_ptr, first + start, TILE, low, high,
            next_above, next_equal, k, MASK_VELOCITY, True, TILE,
        )  # fmt: skip
    if whole < size:
        _select_tile(
            memory_ptr, velocity_ptr, values_ptr, indices_ptr, first + whole, size - whole, low, high,
            next_above, next_equal, k, MASK_VELOCITY, False, TILE,
        )  # fmt: skip
    if low > INFINITY:  # NaNs fill the message: what is not finite and was not marked goes too
        for start in range(0, size, TILE):
            lane = start + tl.arange(0, TILE)
            memory = tl.load(memory_ptr + first + lane, mask=lane < size, other=0.0)
            gone = doubled_bits_of(memory) >= INFINITY
            tl.store(memory_ptr + first + lane, 0.0, mask=gone)
            if MASK_VELOCITY:
                tl.store(velocity_ptr + first + lane, 0.0, mask=gone)


def spans(memory: torch.Tensor) -> tuple[int, int]:
    """Return the programs, and the values of each: a multiple of every candidate's TILE."""
    unit = 8192
    limit = PROGRAMS_PER_SM * device_of(select_kernel, memory).multiprocessors
    units = cdiv(memory.numel(), unit)
    span = cdiv(units, max(1, min(units, limit))) * unit
    return cdiv(memory.numel(), span), span


def first_places(counts: torch.Tensor) -> torch.Tensor:
    """Map counts (P,) of each program -> how many lie before it (P,) int32."""
    return (counts.cumsum(0) - counts).to(torch.int32)


def topk(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
    masking: bool,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.topk`` on the GPU; ``gradient`` is contiguous."""
    n = memory.numel()
    programs, span = spans(memory)
    base = window(gradient, memory, velocity, scale, momentum, k)
    counts = memory.new_empty((programs, BINS), dtype=torch.int32)
    config = choose(
        "sparsify_accumulate", ACCUMULATE, lambda: CANDIDATES,
        dtype=gradient.dtype, velocity=velocity is not None,
    )  # fmt: skip
    launch(
        accumulate_kernel, (programs,),
        gradient, memory, memory if velocity is None else velocity,
        memory if scale is None else scale, base, counts, n, span, float(momentum),
        HAS_VELOCITY=velocity is not None, HAS_SCALE=scale is not None,
        BINS=BINS, FINE_BINS=FINE_BINS, FINE_EXTRA=FINE_EXTRA,
        FINE_SHIFT=FINE_SHIFT, COARSE_SHIFT=COARSE_SHIFT, on=gradient, **config,
    )  # fmt: skip
    chosen, above_total = bin_of_kth(counts.sum(0), k)
    higher = torch.arange(BINS, device=memory.device) > chosen
    first_above = first_places((counts * higher).sum(1))
    equal = first_places(counts.index_select(1, chosen).view(-1))
    bounds = edge_of(torch.cat([chosen, chosen + 1]), base).clamp_(max=LARGEST_BITS + 1)
    first_equal = (equal + above_total).to(torch.int32)
    values, indices = memory.new_empty(k), memory.new_empty(k, dtype=torch.int32)
    masked = velocity if masking else None
    _select(memory, masked, bounds, first_above, first_equal, values, indices, span)
    return values, indices


def above(
    memory: torch.Tensor, threshold: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.above`` on the GPU. Reads the memory twice: to count, and to select."""
    programs, span = spans(memory)
    counts = memory.new_empty(programs, dtype=torch.int32)
    config = choose("sparsify_count", SELECT, lambda: CANDIDATES)
    launch(
        count_kernel, (programs,), memory, threshold, counts, memory.numel(), span,
        on=memory, **config,
    )  # fmt: skip
    # Nothing reaches the upper bound: all are "equal" and fill the places in order.
    low = magnitude_bits(threshold).view(1).long()
    bounds = torch.cat([low, torch.full_like(low, LARGEST_BITS + 1)])
    values = memory.new_zeros(capacity)
    indices = memory.new_zeros(capacity, dtype=torch.int32)
    first = first_places(counts)
    _select(memory, None, bounds, first, first, values, indices, span)
    return values, indices


def _select(
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    bounds: torch.Tensor,
    first_above: torch.Tensor,
    first_equal: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    span: int,
) -> None:
    n, k = memory.numel(), values.numel()
    config = choose("sparsify_select", SELECT, lambda: SELECT_CANDIDATES)
    launch(
        select_kernel, (cdiv(n, span),),
        memory, memory if velocity is None else velocity, bounds.to(torch.int32), first_above,
        first_equal, values, indices, n, span, k,
        MASK_VELOCITY=velocity is not None, on=memory, **config,
    )  # fmt: skip
