"""The projection onto the vocabulary, and the loss that never holds all logits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.cross_entropy import cross_entropy
from stoker_kernels.ops.linear_cross_entropy import linear_cross_entropy

IGNORE_INDEX = -100


class LMHead(nn.Linear):
    """A linear layer C -> V that also computes its own softmax cross-entropy."""

    def __init__(
        self, dim: int, vocab_size: int, *, bias: bool = False, ops: Impl = "stoker"
    ) -> None:
        super().__init__(dim, vocab_size, bias=bias)
        self.ours = checked(ops, "LMHead: ops") == "stoker"

    def loss(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Map x (..., C), targets (...) int64 -> mean loss in nats over targets that are not -100, fp32.

        Ours holds the logits of a few tokens at a time; PyTorch's path holds all of them.
        """
        if self.ours:
            return linear_cross_entropy(
                x, self.weight, targets, bias=self.bias, ignore_index=IGNORE_INDEX,
                label_smoothing=label_smoothing, z_loss=z_loss,
            )  # fmt: skip
        return self.loss_of(self(x), targets, label_smoothing=label_smoothing, z_loss=z_loss)

    def loss_of(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Compute :meth:`loss` of logits (..., V) that exist already."""
        if self.ours:
            return cross_entropy(
                logits, targets, ignore_index=IGNORE_INDEX,
                label_smoothing=label_smoothing, z_loss=z_loss,
            )  # fmt: skip
        rows, classes = logits.flatten(0, -2).float(), targets.flatten()  # (T, V), (T,)
        loss = F.cross_entropy(
            rows, classes, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
        )
        if z_loss:
            square = rows.logsumexp(-1).square().masked_fill(classes == IGNORE_INDEX, 0.0)
            loss = loss + z_loss * square.sum() / (classes != IGNORE_INDEX).sum()
        return loss
