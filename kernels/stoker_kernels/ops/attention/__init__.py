"""Flash attention: exact attention in O(S) memory, forward and backward, dense and packed."""

from __future__ import annotations

from stoker_kernels.ops.attention.autograd import flash_attention, flash_attention_varlen

__all__ = ("flash_attention", "flash_attention_varlen")
