"""Rotary frequencies for contexts longer than the trained one: Llama 3's and YaRN's.

``rotary_tables`` calls them; a kernel sees only the tables. theta_i = base^(-2i/dim) is pair i's angle per
position, and theta_i / factor stretches the context by ``factor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def _check(what: str, factor: float, original_max_len: int, low: float, high: float) -> None:
    if not 1.0 <= factor < math.inf or original_max_len < 1 or not 0.0 < low < high:
        raise ValueError(
            f"{what} needs factor >= 1, original_max_len >= 1 and 0 < the low bound < the high one, got "
            f"{factor}, {original_max_len}, {low}, {high}"
        )


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretch by how often a pair turns within the trained context, as Llama 3.1 does.

    With r = original_max_len * theta / 2 pi turns: theta from ``high_freq_factor`` turns on, theta / factor
    up to ``low_freq_factor``, between them linear in r.
    """

    factor: float
    original_max_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check("Llama3Scaling", self.factor, self.original_max_len,
               self.low_freq_factor, self.high_freq_factor)  # fmt: skip

    @property
    def magnitude(self) -> float:
        """Factor of both tables."""
        return 1.0

    def frequencies(self, theta: torch.Tensor, dim: int, base: float) -> torch.Tensor:
        """Map theta (dim/2,) fp64 -> the stretched (dim/2,)."""
        turns = self.original_max_len * theta / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return theta * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Stretch by a ramp over the pairs, and sharpen attention (Peng et al., arXiv 2309.00071, 3.2 and 3.4).

    Pair d(b) = dim ln(original_max_len / 2 pi b) / (2 ln base) turns b times within the trained context:
    theta up to floor(d(beta_fast)), theta / factor from ceil(d(beta_slow)) on, between them linear in
    the pair.
    ``attention_factor`` multiplies both tables, 0.1 ln(factor) + 1 by default.
    """

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check("YarnScaling", self.factor, self.original_max_len, self.beta_slow, self.beta_fast)

    @property
    def magnitude(self) -> float:
        """Factor of both tables."""
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor

    def frequencies(self, theta: torch.Tensor, dim: int, base: float) -> torch.Tensor:
        """Map theta (dim/2,) fp64 -> the stretched (dim/2,)."""

        def pair(turns: float) -> float:
            length = self.original_max_len / (2 * math.pi * turns)
            return dim * math.log(length) / (2 * math.log(base))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), dim - 1)
        index = torch.arange(dim // 2, dtype=theta.dtype, device=theta.device)
        stretched = ((index - low) / (high - low or 0.001)).clamp(0.0, 1.0)
        return theta * (1.0 - stretched + stretched / self.factor)


RotaryScaling = Llama3Scaling | YarnScaling
