"""Gradient exchange of few values: top-k with error feedback, DGC, and SIDCo's statistical threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stoker_kernels.compression.interface import Combine, Message, OneRound, message_of
from stoker_kernels.ops.sparsify import topk_compress
from stoker_kernels.runtime.backend import compute_dtype


class TopK(OneRound):
    """The ``ratio`` of values that are largest, as fp32 values and int32 places; the rest is kept.

    Exactly ``max(1, ceil(ratio * n))`` values, ties or not: 8 bytes each (see ``ops/sparsify``). All
    workers receive all messages. Non-finite values are sent first; the memory forgets them.
    """

    name = "topk"
    residual = "memory"

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        check_fraction("ratio", ratio)
        self.ratio = ratio

    def count(self, n: int, step: int) -> int:
        """Return how many of ``n`` values are sent in ``step``."""
        return max(1, min(n, math.ceil(self.ratio * n)))

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the largest values of memory plus gradient."""
        k = self.count(gradient.numel(), self._begin(name))
        memory = self._memory_tensor(name, "memory", gradient)
        return message_of(gradient, Combine.GATHER, *topk_compress(gradient, memory, k))

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the mean of the messages."""
        return scatter_mean(messages)

    def config(self) -> dict[str, Any]:
        """Return the ratio."""
        return {"ratio": self.ratio}


class DGC(TopK):
    """Deep Gradient Compression (Lin et al. 2018): top-k of a momentum that is corrected for its delay.

    velocity = momentum * velocity + g and memory += velocity; the largest of the memory are sent,
    and velocity and memory forget what was sent (``masking``). So the result is a momentum already:
    train with plain SGD. ``clip`` bounds the norm of each tensor's gradient to clip / sqrt(workers)
    before it is accumulated. The ratio falls from 25 % to ``ratio`` over the first
    ``warmup_steps``, exponentially and in five stages. A non-finite gradient is passed on unclipped.
    """

    name = "dgc"

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        *,
        masking: bool = True,
        clip: float | None = None,
        workers: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(ratio)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if clip is not None and not clip > 0.0:
            raise ValueError(f"clip must be a positive norm or None, got {clip}")
        if workers < 1 or warmup_steps < 0:
            raise ValueError(f"workers={workers} and warmup_steps={warmup_steps} are too small")
        self.momentum, self.masking, self.clip = momentum, masking, clip
        self.workers, self.warmup_steps = workers, warmup_steps

    def ratio_at(self, step: int) -> float:
        """Return the ratio of a step: 0.25 * (ratio / 0.25)^(stage / 5) while warming up."""
        if step >= self.warmup_steps or self.ratio >= 0.25:
            return self.ratio
        stage = step * 5 // self.warmup_steps  # 0 .. 4
        return 0.25 * (self.ratio / 0.25) ** (stage / 5)

    def count(self, n: int, step: int) -> int:
        """Do as :meth:`TopK.count`, at the step's ratio."""
        return max(1, min(n, math.ceil(self.ratio_at(step) * n)))

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the largest values of the accumulated momentum."""
        k = self.count(gradient.numel(), self._begin(name))
        values, indices = topk_compress(
            gradient,
            self._memory_tensor(name, "memory", gradient),
            k,
            velocity=self._memory_tensor(name, "velocity", gradient),
            momentum=self.momentum,
            masking=self.masking,
            scale=self._clipping(gradient),
        )
        return message_of(gradient, Combine.GATHER, values, indices)

    def _clipping(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.clip is None:
            return None
        wide = compute_dtype(gradient.dtype)
        norm = torch.linalg.vector_norm(gradient.reshape(-1), dtype=wide).view(1)
        bound = self.clip / math.sqrt(self.workers)
        # An infinite norm would scale all to 0 and the infinity to NaN: both are passed on as they are.
        return torch.where(norm.isfinite() & (norm > bound), bound / norm, 1.0)

    def config(self) -> dict[str, Any]:
        """Return all options."""
        return {
            "ratio": self.ratio,
            "momentum": self.momentum,
            "masking": self.masking,
            "clip": self.clip,
            "workers": self.workers,
            "warmup_steps": self.warmup_steps,
        }


def scatter_mean(messages: Sequence[Message]) -> torch.Tensor:
    """Return the mean of sparse messages (values, indices), added in their order: all get the same bits."""
    first = messages[0]
    values = first.tensors[0]
    total = values.new_zeros(first.shape.numel())
    for message in messages:  # places within a message differ, or add zero
        values, indices = message.tensors
        total.index_add_(0, indices, values)
    return total.div_(len(messages)).view(first.shape).to(first.dtype)


def check_fraction(what: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` lies in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{what} must be in (0, 1], got {value}")
