"""Sparse gradient messages in PyTorch: the specification, and the CPU implementation.

Accumulation (Lin et al. 2018, Deep Gradient Compression; plain error feedback without a velocity):
    velocity = momentum * velocity + scale * gradient,   memory += velocity
    memory  += scale * gradient                          without a velocity
Top-k selection sorts nothing but a sample. The k-th largest magnitude of some 2^13 values, evenly spaced,
centres a window of 8 octaves (the sampled threshold of the same paper). All magnitudes are then counted in
BINS bins: 16 to an octave inside the window, one to two octaves outside. With B the bin of the k-th
largest, everything in higher bins is sent, and of B itself as many as are missing to k, by index. So a
message has exactly k values, ties or not, and what it leaves out is at most 1/16 larger than what it
sends: a poor sample costs resolution (a factor of 4), never a value too many or too few.
Selection above a threshold sends the first ``capacity`` values of magnitude >= threshold, by index.

What is sent is taken out of the memory, and out of the velocity too (momentum factor masking).
NaN and infinity are the largest: they are sent, and where more of them exist than fit, the memory
forgets them. So a message shows them and the memory stays finite.
"""

from __future__ import annotations

import torch

BINS = 256
FINE_SHIFT, COARSE_SHIFT = 19, 24  # bits of an fp32 below a bin: 1/16 of an octave, two octaves
FINE_BINS = 128
FINE_EXTRA = 124  # so many more bins than coarse ones would be in the window
SAMPLES = 1 << 13
LARGEST_BITS = 0x7FFFFFFE  # of any magnitude; the NaN 0x7FFFFFFF counts as this, below a bound


def accumulate(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
) -> None:
    """Add gradient (n,) to memory (n,) and velocity (n,), in place; scale (1,)."""
    update = gradient.to(memory.dtype)
    if scale is not None:
        update = update * scale
    if velocity is not None:
        update = velocity.mul_(momentum).add_(update)
    memory += update


def magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    """Return |values| as the bits of an fp32, int32: ordered as the magnitudes, NaN on top."""
    bits = values.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    return bits.clamp_(max=LARGEST_BITS)


def window(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
    k: int,
) -> torch.Tensor:
    """Return the first magnitude bits (1,) int32 of the finely counted window, before accumulation."""
    n = memory.numel()
    every = slice(None, None, max(1, n // SAMPLES))
    sample = memory[every].clone()
    drift = None if velocity is None else velocity[every].clone()
    accumulate(gradient[every], sample, drift, scale, momentum)
    count = sample.numel()
    rank = max(1, round(k * count / n))
    kth = magnitude_bits(sample).kthvalue(count - rank + 1).values.view(1)
    low = (kth >> COARSE_SHIFT) - 2  # two coarse bins: four octaves below
    highest = (1 << (31 - COARSE_SHIFT)) - (FINE_BINS - FINE_EXTRA) - 1  # its end is an int32
    return low.clamp_(0, highest) << COARSE_SHIFT


def bin_of(bits: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the bin of each magnitude, monotone in it, for a window that starts at base (1,)."""
    coarse = bits >> COARSE_SHIFT
    fine = (base >> COARSE_SHIFT) + ((bits - base) >> FINE_SHIFT)
    inside = bits < base + (FINE_BINS << FINE_SHIFT)
    return torch.where(bits < base, coarse, torch.where(inside, fine, coarse + FINE_EXTRA))


def edge_of(bins: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the lowest magnitude bits of each bin, int64."""
    first = base.long() >> COARSE_SHIFT
    fine = base + ((bins - first) << FINE_SHIFT)
    beyond = (bins - FINE_EXTRA) << COARSE_SHIFT
    inside = bins < first + FINE_BINS
    return torch.where(bins < first, bins << COARSE_SHIFT, torch.where(inside, fine, beyond))


def bin_of_kth(counts: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Map counts (BINS,) of all values -> the k-th largest's bin (1,), and how many lie above it (1,)."""
    at_least = counts.flip(0).cumsum(0).flip(0)  # values in this bin or a higher one
    chosen = (at_least >= k).sum().sub_(1).view(1)  # at_least falls: the last bin that reaches k
    return chosen, at_least.gather(0, chosen) - counts.gather(0, chosen)


def take(
    memory: torch.Tensor, velocity: torch.Tensor | None, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the values at ``indices`` out of the memory (and velocity) -> values, int32 indices."""
    values = memory[indices]
    memory[indices] = 0.0
    if velocity is not None:
        velocity[indices] = 0.0
        velocity.nan_to_num_(0.0, 0.0, 0.0)
    memory.nan_to_num_(0.0, 0.0, 0.0)
    return values, indices.to(torch.int32)


def topk(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
    masking: bool,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulate, then take k values out of memory (n,) -> values (k,), indices (k,) int32."""
    base = window(gradient, memory, velocity, scale, momentum, k)
    accumulate(gradient, memory, velocity, scale, momentum)
    bins = bin_of(magnitude_bits(memory), base)
    chosen, _ = bin_of_kth(torch.bincount(bins, minlength=BINS), k)
    above = (bins > chosen).nonzero().view(-1)
    equal = (bins == chosen).nonzero().view(-1)[: k - above.numel()]
    return take(memory, velocity if masking else None, torch.cat([above, equal]))


def above(
    memory: torch.Tensor, threshold: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take what reaches threshold (1,) -> values (capacity,), indices (capacity,) int32.

    Places that nothing fills hold the value 0 and the index 0.
    """
    values = memory.new_zeros(capacity)
    indices = memory.new_zeros(capacity, dtype=torch.int32)
    reached = magnitude_bits(memory) >= magnitude_bits(threshold)
    chosen = reached.nonzero().view(-1)[:capacity]
    count = chosen.numel()
    values[:count], indices[:count] = take(memory, None, chosen)
    return values, indices
