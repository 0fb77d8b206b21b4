"""RMSNorm and LayerNorm that can take the residual sum, and dropout before it, into the same pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import overload

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.layer_norm import layer_norm
from stoker_kernels.ops.rms_norm import rms_norm


class _Norm(nn.Module, ABC):
    """``norm(x) -> y``, or ``norm(x, residual) -> (norm(h), h)`` with ``h = residual + dropout(x)``."""

    def __init__(self, dim: int, eps: float, dropout: float, ops: Impl) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"{type(self).__name__}: dropout must lie in [0, 1], got {dropout}")
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.dropout = eps, dropout
        self.ours = checked(ops, f"{type(self).__name__}: ops") == "stoker"

    @overload
    def forward(self, x: torch.Tensor, residual: None = None) -> torch.Tensor: ...
    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Map x, residual (..., C) -> y (..., C), and with a residual h (..., C), the next residual.

        ``seed`` (1,) int64 is of the dropout in our kernel, drawn where it is None. Under autocast x may
        be narrower than the residual stream; the stream's dtype is kept.
        """
        if residual is None:
            return self._ours(x) if self.ours else self._torch(x)
        x = x.to(residual.dtype)
        if self.ours:
            return self._ours_add(x, residual, seed)
        h = residual + F.dropout(x, self.dropout, self.training)
        return self._torch(h), h

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, dropout={self.dropout}, ours={self.ours}"

    @abstractmethod
    def _ours(self, x: torch.Tensor) -> torch.Tensor:
        """Run our kernel on x alone."""

    @abstractmethod
    def _ours_add(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run our kernel on the residual sum: y and h."""

    @abstractmethod
    def _torch(self, x: torch.Tensor) -> torch.Tensor:
        """Run PyTorch's norm of x."""


class RMSNorm(_Norm):
    """RMSNorm with a weight (dim,), as ``torch.nn.RMSNorm``."""

    def __init__(
        self, dim: int, eps: float = 1e-6, *, dropout: float = 0.0, ops: Impl = "stoker"
    ) -> None:
        super().__init__(dim, eps, dropout, ops)

    def _ours(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def _ours_add(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return rms_norm(x, self.weight, eps=self.eps, residual=residual)

    def _torch(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(_Norm):
    """LayerNorm with a weight and a bias (dim,), as ``torch.nn.LayerNorm``."""

    def __init__(
        self, dim: int, eps: float = 1e-5, *, dropout: float = 0.0, ops: Impl = "stoker"
    ) -> None:
        super().__init__(dim, eps, dropout, ops)
        self.bias = nn.Parameter(torch.zeros(dim))

    def _ours(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def _ours_add(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return layer_norm(
            x, self.weight, self.bias, eps=self.eps,
            residual=residual, dropout_p=self.dropout, training=self.training, seed=seed,
        )  # fmt: skip

    def _torch(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
