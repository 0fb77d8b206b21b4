"""Softmax over the last dimension with a scale, a boolean mask and the causal triangle."""

from __future__ import annotations

from stoker_kernels.ops.softmax.autograd import softmax

__all__ = ("softmax",)
