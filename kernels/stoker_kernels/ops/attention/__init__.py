"""Causal flash attention: exact attention in O(S) memory, forward and backward."""

from __future__ import annotations

from stoker_kernels.ops.attention.autograd import flash_attention

__all__ = ("flash_attention",)
