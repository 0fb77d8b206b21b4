"""Softmax cross-entropy that never materialises probabilities in the forward pass."""

from __future__ import annotations

from stoker_kernels.ops.cross_entropy.autograd import cross_entropy

__all__ = ("cross_entropy",)
