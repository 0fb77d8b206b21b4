"""Flash attention: exact attention in O(S) memory, forward and backward, dense and packed."""

from __future__ import annotations

from stoker_kernels.ops.attention.autograd import flash_attention, flash_attention_varlen
from stoker_kernels.ops.attention.blocks import BlockMask
from stoker_kernels.ops.attention.padding import flash_attention_padded
from stoker_kernels.ops.attention.relative import RelativeBias

__all__ = (
    "BlockMask",
    "RelativeBias",
    "flash_attention",
    "flash_attention_padded",
    "flash_attention_varlen",
)
