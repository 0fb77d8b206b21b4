"""Rotary position embedding: half-split or interleaved, partial, packed sequences, any offsets."""

from __future__ import annotations

from stoker_kernels.ops.rotary.autograd import rotary, rotary_tables
from stoker_kernels.ops.rotary.scaling import Llama3Scaling, YarnScaling

__all__ = ("Llama3Scaling", "YarnScaling", "rotary", "rotary_tables")
