"""Random bits for dropout that need no storage: Philox4x32-10, counted by element, in PyTorch.

The same numbers as ``tl.randint4x`` in the kernels (see ``dropout``), so the CPU path, the reference
and the GPU drop the same elements for the same seed, and a backward pass draws the mask again instead
of loading it. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at a time: what ten rounds work on stays in the processor's cache


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draw a seed (1,) int64 from torch's generator of ``device``.

    ``torch.manual_seed`` repeats it, ``torch.utils.checkpoint`` replays it, and a CUDA graph advances it at
    every replay.
    """
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold_of(p: float, name: str) -> int:
    """Return dropout probability ``p`` in 2^-24ths: an element is kept when its 24 random bits reach it.

    Raises ``ValueError`` naming ``name`` for a probability outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1], got {p}")
    return round(p * 2**24)


def philox4x32(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """Map counter (...) int64 -> (..., 4) int64 holding four independent uint32 each."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 wraps as two's complement: the 64 bits of a product are right, its sign means nothing.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = (b >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (a >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = b.bitwise_and_(_MASK), a.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


def keep_mask(seed: torch.Tensor, rows: int, columns: int, threshold: int) -> torch.Tensor:
    """Return the elements that dropout keeps: (rows, columns) bool. One counter serves four columns."""
    quads, key = -(-columns // 4), int(seed.item())
    mask = torch.empty(rows * quads, 4, dtype=torch.bool, device=seed.device)
    for start in range(0, rows * quads, _CHUNK):
        end = min(start + _CHUNK, rows * quads)
        counter = torch.arange(start, end, dtype=torch.int64, device=seed.device)
        torch.ge(philox4x32(key, counter) >> 8, threshold, out=mask[start:end])
    return mask.view(rows, quads * 4)[:, :columns].contiguous()
