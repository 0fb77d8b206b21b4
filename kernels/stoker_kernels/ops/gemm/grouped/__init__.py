"""Grouped products of a mixture of experts: each expert's weight times the tokens that were sent to it."""

from __future__ import annotations

from stoker_kernels.ops.gemm.grouped.autograd import grouped_gemm

__all__ = ("grouped_gemm",)
