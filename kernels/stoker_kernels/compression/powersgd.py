"""PowerSGD: gradients as products of two thin matrices (Vogels et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from stoker_kernels.compression.interface import (
    Combine,
    Compressor,
    Exchange,
    Message,
    message_of,
)
from stoker_kernels.runtime.backend import compute_dtype


class PowerSGD(Compressor):
    """The mean of the workers' matrices, to rank ``rank``, by one step of subspace iteration.

    A gradient (n, ...) is a matrix M (n, m) of all other dimensions; with the error added,
        P = mean of M Q over workers, orthonormal columns in fp32;  Q = mean of M^T P;  result P Q^T
    and error = M - P (M^T P)^T, each worker's own. Q starts the next step (warm start); the first is
    drawn from ``seed`` and the tensor's name, the same everywhere. Two all-reduces of (n + m) rank values.

    Sent dense, as the plain mean: vectors, matrices that would not shrink by ``min_rate``
    ((n + m) * rank * min_rate >= n * m), and all in the first ``start`` steps, where gradients change
    too fast for a warm start. Non-finite values reach every worker through P; error and Q stay as they were.
    """

    name = "powersgd"
    residual = "error"

    def __init__(self, rank: int = 4, min_rate: float = 2.0, start: int = 0, seed: int = 0) -> None:
        super().__init__()
        if rank < 1 or min_rate <= 0.0 or start < 0:
            raise ValueError(
                f"rank must be >= 1, min_rate > 0 and start >= 0, got {rank}, {min_rate}, {start}"
            )
        self.rank, self.min_rate, self.start, self.seed = rank, min_rate, start, seed

    def compresses(self, shape: torch.Size) -> bool:
        """Return whether a gradient of this shape is worth two thin matrices."""
        if len(shape) < 2 or not shape.numel():
            return False
        n, m = shape[0], shape.numel() // shape[0]
        return (n + m) * self.rank * self.min_rate < n * m

    def exchange(self, gradient: torch.Tensor, name: str) -> Exchange:
        """Do as :meth:`Compressor.exchange`."""
        gradient = gradient.detach()
        if self._begin(name) < self.start or not self.compresses(gradient.shape):
            (mean,) = yield message_of(gradient, Combine.MEAN, gradient.reshape(-1))
            return mean.tensors[0].view(gradient.shape)
        error = self._memory_tensor(name, "error", gradient)
        matrix = (gradient.reshape(-1).to(error.dtype) + error).view(gradient.shape[0], -1)
        start = self._start(name, matrix)
        (mean,) = yield message_of(gradient, Combine.MEAN, (matrix @ start).view(-1))
        left = orthonormal(mean.tensors[0].view(-1, self.rank))
        right = matrix.t() @ left
        rest = matrix.addmm(left, right.t(), alpha=-1.0).view(-1)
        error.copy_(torch.where(rest.isfinite().all(), rest, error))
        (mean,) = yield message_of(gradient, Combine.MEAN, right.reshape(-1))
        shared = mean.tensors[0].view(-1, self.rank)
        usable = shared.isfinite().all() & shared.any(
            0
        )  # a column of zeros would stay one for ever
        start.copy_(torch.where(usable, shared, start))
        return (left @ shared.t()).view(gradient.shape).to(gradient.dtype)

    def _start(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q (m, rank), of the last step or drawn."""
        fresh = "start" not in self.memory(name)
        flat = self._memory_tensor(name, "start", matrix, matrix.shape[1] * self.rank)
        start = flat.view(-1, self.rank)
        if fresh:
            generator = torch.Generator().manual_seed(crc32(name.encode()) ^ self.seed)
            drawn = torch.randn(start.shape, generator=generator, dtype=torch.float64)
            start.copy_(drawn)
        return start

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return one worker's messages, as :meth:`compress` gives them. Raises ``ValueError`` for several."""
        if len(messages) != 1:
            raise ValueError("powersgd: workers share P before Q, in exchange()")
        message = messages[0]
        if len(message.tensors) == 1:
            return message.tensors[0].view(message.shape)
        left, right = (tensor.view(-1, self.rank) for tensor in message.tensors)
        return (orthonormal(left) @ right.t()).view(message.shape).to(message.dtype)

    def config(self) -> dict[str, Any]:
        """Return all options."""
        return {
            "rank": self.rank,
            "min_rate": self.min_rate,
            "start": self.start,
            "seed": self.seed,
        }


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Make the columns of (n, r) orthonormal in their order, in fp32 or fp64: Gram-Schmidt, done twice.

    A column that lies in the span of those before it (or is zero) becomes zero, not noise: what is
    left of it after the projections must exceed 100 epsilon of what it was.
    """
    columns: list[torch.Tensor] = []
    tolerance = 100 * torch.finfo(compute_dtype(matrix.dtype)).eps
    for column in matrix.unbind(1):
        before = torch.linalg.vector_norm(column)
        if columns:
            basis = torch.stack(columns, 1)
            for _ in range(2):
                column = column - basis @ (basis.t() @ column)
        norm = torch.linalg.vector_norm(column)
        # Written so that a NaN stays one: every worker must see it.
        columns.append(torch.where(norm <= tolerance * before, 0.0, column / norm))
    return torch.stack(columns, 1)
