"""Coarse-grained sparse communication (CSC; Sun et al. 2019, GradientFlow): whole chunks by their norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stoker_kernels.compression.interface import (
    Combine,
    Compressor,
    Exchange,
    Message,
    message_of,
)
from stoker_kernels.compression.sparse import check_fraction


class Chunks(Compressor):
    """The ``ratio`` of fixed-size chunks whose mean L1 norm over all workers is largest, dense.

    Two all-reduces: the norms of all chunks, so that all workers choose the same ones, then the
    chosen chunks. Bytes do not grow with workers, and no places are sent. With ``momentum`` the memory
    accumulates a velocity, and both forget what was sent, as in DGC: then train with plain SGD.
    The last chunk is filled up with zeros; a tensor of at most ``chunk`` values is one chunk of its own
    size. Chunks with non-finite values come first, on all workers; where more of them exist
    than are sent, the memory forgets those values.
    """

    name = "csc"
    residual = "memory"

    def __init__(self, ratio: float = 0.05, chunk: int = 4096, momentum: float = 0.0) -> None:
        super().__init__()
        check_fraction("ratio", ratio)
        if chunk < 1:
            raise ValueError(f"chunk must be a positive number of values, got {chunk}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.ratio, self.chunk, self.momentum = ratio, chunk, momentum

    def layout(self, n: int) -> tuple[int, int, int]:
        """Return (values of a chunk, chunks, chunks sent) for ``n`` values."""
        chunk = min(self.chunk, n)
        chunks = -(-n // chunk)
        return chunk, chunks, max(1, math.ceil(self.ratio * chunks))

    def exchange(self, gradient: torch.Tensor, name: str) -> Exchange:
        """Do as :meth:`Compressor.exchange`."""
        self._begin(name)
        n = gradient.numel()
        chunk, chunks, _ = self.layout(n)
        memory = self._memory_tensor(name, "memory", gradient)
        update = gradient.detach().reshape(-1).to(memory.dtype)
        velocity = self._memory_tensor(name, "velocity", gradient) if self.momentum else None
        memory += update if velocity is None else velocity.mul_(self.momentum).add_(update)
        padded = torch.nn.functional.pad(memory, (0, chunks * chunk - n)).view(chunks, chunk)
        (norms,) = yield message_of(gradient, Combine.MEAN, padded.abs().sum(1))
        chosen = self._choose(norms.tensors[0])
        sent = padded[chosen]
        for kept in (memory, velocity):
            if kept is not None:
                left = torch.nn.functional.pad(kept, (0, chunks * chunk - n)).view(chunks, chunk)
                left = left.index_fill(0, chosen, 0.0).view(-1)[:n]
                kept.copy_(left.nan_to_num(0.0, 0.0, 0.0))
        (mean,) = yield message_of(gradient, Combine.MEAN, sent.view(-1))
        return self._spread(gradient.shape, gradient.dtype, chosen, mean.tensors[0])

    def _choose(self, norms: torch.Tensor) -> torch.Tensor:
        """Choose the chunks to send, the same wherever the norms are; NaN is largest, ties go by index."""
        count = max(1, math.ceil(self.ratio * norms.numel()))
        order = norms.nan_to_num(float("inf")).sort(descending=True, stable=True).indices
        return order[:count].sort().values

    def _spread(
        self, shape: torch.Size, dtype: torch.dtype, chosen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        n = shape.numel()
        chunk, chunks, count = self.layout(n)
        out = values.new_zeros((chunks, chunk))
        out[chosen] = values.view(count, chunk)
        return out.view(-1)[:n].view(shape).to(dtype)

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return norms and chunks of one worker alone, as :meth:`compress` gives them.

        Raises ``ValueError`` for several: alone, they chose different chunks.
        """
        if len(messages) != 1:
            raise ValueError("csc: workers choose their chunks together, in exchange()")
        norms, values = messages[0].tensors
        return self._spread(messages[0].shape, messages[0].dtype, self._choose(norms), values)

    def config(self) -> dict[str, Any]:
        """Return all options."""
        return {"ratio": self.ratio, "chunk": self.chunk, "momentum": self.momentum}
