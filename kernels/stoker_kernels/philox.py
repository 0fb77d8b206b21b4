"""Random bits for dropout that need no storage: Philox4x32-10, counted by element, in PyTorch.

The same numbers as ``tl.randint4x`` in the kernels (see ``_dropout``), so the CPU path, the reference
and the GPU drop the same elements for the same seed, and a backward pass draws the mask again instead
of loading it. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def draw_seed(device: torch.device) -> torch.Tensor:
    """A seed (1,) int64 from torch's generator of ``device``: ``torch.manual_seed`` repeats it,

    ``torch.utils.checkpoint`` replays it, and a CUDA graph advances it at every replay.
    """
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold_of(p: float, name: str) -> int:
    """Dropout probability ``p`` in 2^-24ths: an element is kept when its 24 random bits reach it.

    Raises ``ValueError`` naming ``name`` for a probability outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1], got {p}")
    return round(p * 2**24)


def philox4x32(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """counter (...) int64 -> (..., 4) int64 holding four independent uint32 each."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high_b, low_b = _multiply(_ROUND_B, c2)
        high_a, low_a = _multiply(_ROUND_A, c0)
        c0, c2 = high_b ^ c1 ^ k0, high_a ^ c3 ^ k1
        c1, c3 = low_b, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


def _multiply(constant: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of ``constant * value``; int64 wraps, so the halves are taken apart."""
    low = constant * (value & 0xFFFF)  # < 2^48
    high = constant * (value >> 16) + (low >> 16)  # < 2^49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def keep_mask(seed: torch.Tensor, rows: int, columns: int, threshold: int) -> torch.Tensor:
    """The elements that dropout keeps: (rows, columns) bool. One counter serves four columns."""
    quads = -(-columns // 4)
    counter = torch.arange(rows * quads, dtype=torch.int64, device=seed.device).view(rows, quads)
    bits = philox4x32(int(seed.item()), counter).reshape(rows, quads * 4)[:, :columns]
    return (bits >> 8) >= threshold
