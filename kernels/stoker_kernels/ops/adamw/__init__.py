"""Fused AdamW: one pass over parameter, gradient and moments for all tensors of a step."""

from __future__ import annotations

from stoker_kernels.ops.adamw.optimizer import AdamW

__all__ = ("AdamW",)
