"""1-bit compression with error feedback in PyTorch: the specification, and the CPU implementation.

Formulas, per block of BLOCK consecutive values (the last may be shorter), in fp32 (fp64 for fp64):
    u     = gradient + error
    scale = mean(|u|)                        argmin over s of |u - s * sign(u)|^2
    q     = scale where u >= 0, else -scale
    error = u - q                            what the next message makes up for
Bit i of word w of the message is 1 where u[32 w + i] >= 0; bits beyond the end are 0. The result of W
messages is the mean of their q.
Sources: Seide et al. 2014 (1-bit SGD: error feedback), Karimireddy et al. 2019 (EF-signSGD: the scale).

A block with a value that is not finite sends a scale that is not finite, so every receiver sees it,
and keeps its old error: the step can be skipped and training goes on.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCK = 1024  # values that share a scale: 32 words, +3 % of the message
WORD = 32


def compress(gradient: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map gradient, error (n,) -> words (ceil(n/32),) int32, scales (ceil(n/BLOCK),); updates ``error``."""
    n = gradient.numel()
    u = gradient.to(error.dtype) + error
    blocks = F.pad(u, (0, -n % BLOCK)).view(-1, BLOCK)
    counts = torch.full((blocks.shape[0], 1), float(BLOCK), dtype=u.dtype, device=u.device)
    if n % BLOCK:
        counts[-1] = n % BLOCK
    scales = blocks.abs().sum(1, keepdim=True) / counts
    positive = blocks >= 0
    q = torch.where(positive, scales, -scales)
    old = F.pad(error, (0, -n % BLOCK)).view(-1, BLOCK)
    error.copy_(torch.where(scales.isfinite(), blocks - q, old).view(-1)[:n])
    bits = F.pad(positive.view(-1)[:n], (0, -n % WORD)).view(-1, WORD)
    # The top bit is the sign of an int32: summed in 64 bits, then wrapped.
    words = (bits.long() << torch.arange(WORD, device=u.device)).sum(1).to(torch.int32)
    return words, scales.view(-1)


def decompress(
    words: torch.Tensor, scales: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    """Map words (W, ceil(n/32)) int32, scales (W, ceil(n/BLOCK)) -> the mean of the W messages (n,)."""
    total = torch.zeros(n, dtype=scales.dtype, device=scales.device)
    lanes = torch.arange(WORD, dtype=torch.int32, device=words.device)
    for message, scale in zip(words, scales, strict=True):
        positive = ((message[:, None] >> lanes) & 1).view(-1)[:n].bool()
        each = scale.repeat_interleave(BLOCK)[:n]
        total += torch.where(positive, each, -each)
    return (total / words.shape[0]).to(dtype)
