"""Embedding and head whose vocabulary is cut over a tensor group (Shoeybi et al. 2019, section 3).

The loss never gathers logits: the ranks exchange three numbers for each token. Called by ``our_models``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from stoker_kernels.nn.head import IGNORE_INDEX, LMHead

if TYPE_CHECKING:
    from stoker_train.sharded.parallel.tensor.exchange import TensorGroup


def embedded(weight: torch.Tensor, tokens: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Look up tokens (B, S) in this rank's rows (V / ranks, C) of the table -> its part of the sum."""
    rows = weight.shape[0]
    place = tokens - group.rank * rows
    outside = (place < 0) | (place >= rows)
    found = F.embedding(place.masked_fill(outside, 0), weight)
    return found.masked_fill(outside[..., None], 0.0)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: TensorGroup,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Map this rank's logits (T, V / ranks) and all targets (T,) to the mean loss in nats, fp32.

    As :meth:`LMHead.loss`; targets of -100 do not count.
    """
    logits = logits.float()
    rows = logits.shape[1]
    top = group.greatest(logits.detach().amax(1))
    shifted = logits - top[:, None]
    place = targets - group.rank * rows
    outside = (place < 0) | (place >= rows)
    picked = shifted.gather(1, place.masked_fill(outside, 0)[:, None])[:, 0]
    parts = [shifted.exp().sum(1), picked.masked_fill(outside, 0.0)]
    if label_smoothing:
        parts.append(shifted.sum(1))
    exponentials, chosen, *every = group.sum(torch.stack(parts))
    log_sum = exponentials.log()
    loss = log_sum - chosen
    if label_smoothing:
        mean = every[0] / (rows * group.size)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_sum - mean)
    if z_loss:
        loss = loss + z_loss * (log_sum + top).square()
    counted = targets != IGNORE_INDEX
    result: torch.Tensor = loss.masked_fill(~counted, 0.0).sum() / counted.sum()
    return result


def head_members(group: TensorGroup) -> dict[str, Any]:
    """Return what an :class:`LMHead` does otherwise when its rows are cut."""

    def forward(self: LMHead, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> all logits (..., V), on each rank."""
        return group.join(F.linear(group.enter(x), self.weight, self.bias), -1)

    def loss(
        self: LMHead,
        x: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Map x (..., C), targets (...) -> the mean loss; logits are of this rank's rows alone."""
        x = group.enter(x).flatten(0, -2)
        return cross_entropy(
            F.linear(x, self.weight, self.bias), targets.flatten(), group,
            label_smoothing=label_smoothing, z_loss=z_loss,
        )  # fmt: skip

    return {"forward": forward, "loss": loss}
