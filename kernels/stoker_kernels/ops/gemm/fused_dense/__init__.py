"""Dense layers with bias, activation or gate, and residual in the epilogue of one GEMM."""

from __future__ import annotations

from stoker_kernels.ops.gemm.fused_dense.autograd import fused_dense, fused_glu_dense

__all__ = ("fused_dense", "fused_glu_dense")
