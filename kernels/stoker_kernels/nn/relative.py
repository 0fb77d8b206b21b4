"""T5's relative positions as a module: the learned table, and the buckets of distances kept beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker_kernels.ops.attention import relative as op


class RelativeBias(nn.Module):
    """The table that all layers of an encoder or decoder share: weight (buckets, heads).

    The buckets of all distances are no parameters: they are not saved, and made anew wherever it moves.
    """

    buckets: torch.Tensor  # (2 max_distance + 1,) int32

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, heads))
        op.RelativeBias(self.weight, bidirectional, max_distance).checked("RelativeBias", heads)
        self.register_buffer("buckets", self._made(self.weight.device), persistent=False)

    def _made(self, device: torch.device) -> torch.Tensor:
        return op.distance_buckets(
            self.weight.shape[0], self.bidirectional, self.max_distance, device
        )

    def _apply(self, fn: Any, recurse: bool = True) -> RelativeBias:
        super()._apply(fn, recurse)
        self.buckets = self._made(self.weight.device)
        return self

    @property
    def given(self) -> op.RelativeBias:
        """The argument of our attention."""
        return op.RelativeBias(self.weight, self.bidirectional, self.max_distance, self.buckets)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Map column - row (S, S_k) int64 to the bias (heads, S, S_k)."""
        far = self.max_distance
        chosen = self.buckets[distance.clamp(-far, far) + far]  # (S, S_k)
        return self.weight[chosen].permute(2, 0, 1)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return (
            f"{heads}, buckets={buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )
