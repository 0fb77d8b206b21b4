"""GELU of a sum with a bias: what follows a linear layer without one."""

from __future__ import annotations

from stoker_kernels.ops.bias_gelu.autograd import BiasGELU, bias_gelu

__all__ = ("BiasGELU", "bias_gelu")
