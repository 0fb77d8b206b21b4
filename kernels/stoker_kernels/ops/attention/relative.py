"""T5's relative position bias for attention: a learnt number for each bucket of distances and head.

``flash_attention(relative_bias=RelativeBias(table))`` computes the bias in the kernel: no tensor of
(rows, columns) is made, forward or backward. Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


def relative_buckets(
    distance: torch.Tensor, num_buckets: int, bidirectional: bool, max_distance: int
) -> torch.Tensor:
    """Map distances column - row, int64, to buckets of the same shape, as transformers' T5 does.

    Half of them hold one distance each, the others grow by a constant factor up to ``max_distance``, and the
    last takes all beyond. Bidirectional: the upper half of the buckets is for columns to the right.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = (exact + (far * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, grown)


def distance_buckets(
    num_buckets: int,
    bidirectional: bool = True,
    max_distance: int = 128,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return (2 max_distance + 1,) int32: the buckets of the distances -max_distance to max_distance.

    Whoever attends often with one table computes it once, as ``RelativeBias.buckets``.
    """
    distance = torch.arange(-max_distance, max_distance + 1, device=device)
    return relative_buckets(distance, num_buckets, bidirectional, max_distance).to(torch.int32)


class RelativeBias(NamedTuple):
    """Bias of attention's scores by distance: table[bucket of (column - row - S_k + S_q), head].

    ``table`` (num_buckets, heads) fp32, bf16 or fp16 gets a gradient. ``bidirectional`` as in an encoder;
    a decoder's table has all buckets for what lies behind. ``buckets`` are ``distance_buckets`` of the same
    numbers, computed at every call where None.
    """

    table: torch.Tensor
    bidirectional: bool = True
    max_distance: int = 128
    buckets: torch.Tensor | None = None

    def checked(self, name: str, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table and its buckets. Raises ``ValueError`` naming what does not fit."""
        table, buckets = self.table, self.buckets
        if table.ndim != 2 or table.shape[1] != heads or not table.is_floating_point():
            raise ValueError(
                f"{name}: relative_bias.table must be (num_buckets, {heads}) floating point, got "
                f"{tuple(table.shape)} {table.dtype}"
            )
        least = 4 if self.bidirectional else 2
        ways = 2 if self.bidirectional else 1
        if table.shape[0] < least or self.max_distance <= table.shape[0] // ways // 2:
            raise ValueError(
                f"{name}: relative_bias needs at least {least} buckets, and a max_distance above their "
                f"exact ones, got {table.shape[0]} and {self.max_distance}"
            )
        if buckets is None:
            buckets = distance_buckets(
                table.shape[0], self.bidirectional, self.max_distance, table.device
            )
        if buckets.shape != (2 * self.max_distance + 1,) or buckets.dtype != torch.int32:
            raise ValueError(
                f"{name}: relative_bias.buckets must be ({2 * self.max_distance + 1},) int32, as "
                f"distance_buckets makes them, got {tuple(buckets.shape)} {buckets.dtype}"
            )
        return table, buckets
