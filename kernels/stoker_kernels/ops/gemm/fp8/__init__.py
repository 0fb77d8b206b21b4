"""A linear layer whose products run in fp8: e4m3 forward, e5m2 gradients, scales by row or by block."""

from __future__ import annotations

from stoker_kernels.ops.gemm.fp8.autograd import fp8_linear

__all__ = ("fp8_linear",)
