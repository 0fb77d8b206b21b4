"""RMSNorm and LayerNorm of others, on our kernels: the forwards that ``catalogue`` names.

Each falls back to the original where a kernel's result would have another dtype: mixed dtypes, and
autocast over 16-bit values, of which torch makes fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.layer_norm import layer_norm
from stoker_kernels.ops.rms_norm import rms_norm


def same_dtype(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a norm's result has x's dtype, whatever autocast does."""
    if x.dtype != weight.dtype:
        return False
    return x.dtype == torch.float32 or not torch.is_autocast_enabled(x.device.type)


class RMSNormForward:
    """``weight * x / rms(x)``, eps as ``variance_epsilon`` (Llama and its kin, T5)."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        if not same_dtype(hidden_states, self.weight):
            return super().forward(hidden_states)  # type: ignore[misc]
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class OffsetRMSNormForward:
    """``(1 + weight) * x / rms(x)`` (Gemma)."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        if not same_dtype(x, self.weight):
            return super().forward(x)  # type: ignore[misc]
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0)


class TorchRMSNormForward:
    """``torch.nn.RMSNorm`` over the last dimension."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        # Without an eps it is the dtype's epsilon; whose, torch has changed for 16 bits.
        if not same_dtype(x, self.weight) or (self.eps is None and x.dtype != torch.float32):
            return super().forward(x)  # type: ignore[misc]
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps=eps)


class LayerNormForward:
    """``torch.nn.LayerNorm`` over the last dimension, with a weight."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        bias = self.bias
        if not same_dtype(input, self.weight) or not (bias is None or same_dtype(input, bias)):
            return super().forward(input)  # type: ignore[misc]
        return layer_norm(input, self.weight, bias, eps=self.eps)


def why_not_norm(module: Any) -> str:
    """Return why a norm of torch's keeps its own code, "" where it does not."""
    if module.weight is None:
        return "it has no weight"
    if len(module.normalized_shape) != 1:
        return "it normalises several dimensions"
    return ""
