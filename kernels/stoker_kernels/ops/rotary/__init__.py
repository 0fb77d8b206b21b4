"""Rotary position embedding: half-split or interleaved, partial, packed sequences, any offsets."""

from __future__ import annotations

from stoker_kernels.ops.rotary.autograd import rotary, rotary_tables

__all__ = ("rotary", "rotary_tables")
