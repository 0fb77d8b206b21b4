"""A linear layer and softmax cross-entropy in one, which never holds all logits."""

from __future__ import annotations

from stoker_kernels.ops.linear_cross_entropy.autograd import (
    LinearCrossEntropy,
    linear_cross_entropy,
)

__all__ = ("LinearCrossEntropy", "linear_cross_entropy")
