"""ALiBi's slopes as a module: attention scores that fall with distance (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return (heads,) fp32: 2^(-8 i / n), i = 1 .. n, for n heads, a power of two.

    For another number: those of the next lower power n, then the odd ones of 2 n, as the paper's code does.
    """
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-8 * i / (2 * n)) for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class ALiBi(nn.Module):
    """Slopes that attention takes from its scores: slope * |row - column|, times ``scale``.

    They are no parameters: not saved, fp32 when the model is cast, made anew wherever it moves.
    """

    slopes: torch.Tensor  # (heads,)

    def __init__(self, heads: int, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.register_buffer("slopes", alibi_slopes(heads) * scale, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> ALiBi:
        super()._apply(fn, recurse)
        self.slopes = alibi_slopes(self.heads, self.slopes.device) * self.scale
        return self

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Map column - row (S, S_k) int64 to the bias (heads, S, S_k) fp32."""
        return -self.slopes[:, None, None] * distance.abs()

    def extra_repr(self) -> str:
        return f"{self.heads}, scale={self.scale}"
