"""Random bits for dropout that need no storage: Philox4x32-7, counted by element, in PyTorch.

The same numbers as in the kernels (see ``dropout``), so the CPU path, the reference and the GPU drop the
same elements for the same seed, and a backward pass draws the mask again instead of loading it. Source:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), whose section 4 found 7 rounds to
pass all tests of TestU01's BigCrush; 10 are its margin.

An element is kept by 16 bits. So a probability is taken to the nearest 2^-16th, at most 0.0000077 away,
and kept values are scaled by the inverse of the probability that is taken: expectations are exact.
"""

from __future__ import annotations

import torch

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at a time: what the rounds work on stays in the processor's cache
ROUNDS = 7
STEPS = 2**16  # of a probability


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draw a seed (1,) int64 from torch's generator of ``device``.

    ``torch.manual_seed`` repeats it, ``torch.utils.checkpoint`` replays it, and a CUDA graph advances it at
    every replay.
    """
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold_of(p: float, name: str) -> int:
    """Return dropout probability ``p`` in 2^-16ths: an element is kept when its 16 random bits reach it.

    Below 1 it is below 2^16. Raises ``ValueError`` naming ``name`` for a probability outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1], got {p}")
    return STEPS if p == 1.0 else min(round(p * STEPS), STEPS - 1)


def keep_scale_of(p: float) -> float:
    """Return the factor of kept values: 1 over the probability to be kept, 0 where nothing is."""
    kept = STEPS - threshold_of(p, "dropout_p")
    return STEPS / kept if kept else 0.0


def draw_seeds(device: torch.device, count: int) -> tuple[torch.Tensor, ...]:
    """Draw ``count`` seeds, (1,) int64 each, in one launch: a model's dropouts share it in a step."""
    return torch.randint(0, 2**62, (count,), dtype=torch.int64, device=device).split(1)


def philox4x32(seed: int, counter: torch.Tensor, rounds: int = ROUNDS) -> torch.Tensor:
    """Map counter (...) int64 -> (..., 4) int64 holding four independent uint32 each."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        # int64 wraps as two's complement: the 64 bits of a product are right, its sign means nothing.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = (b >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (a >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = b.bitwise_and_(_MASK), a.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


def keep_mask(seed: torch.Tensor, rows: int, columns: int, threshold: int) -> torch.Tensor:
    """Return the elements that dropout keeps: (rows, columns) bool. One counter serves eight columns."""
    octets, key = -(-columns // 8), int(seed.item())
    mask = torch.empty(rows * octets, 4, 2, dtype=torch.bool, device=seed.device)
    for start in range(0, rows * octets, _CHUNK):
        end = min(start + _CHUNK, rows * octets)
        counter = torch.arange(start, end, dtype=torch.int64, device=seed.device)
        words = philox4x32(key, counter)
        torch.ge(words & 0xFFFF, threshold, out=mask[start:end, :, 0])
        torch.ge(words >> 16, threshold, out=mask[start:end, :, 1])
    return mask.view(rows, octets * 8)[:, :columns].contiguous()
