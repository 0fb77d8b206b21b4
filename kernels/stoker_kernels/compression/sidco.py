"""SIDCo: a threshold from statistics instead of a sort (Abdelmoniem et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stoker_kernels.compression.interface import Combine, Message, OneRound, message_of
from stoker_kernels.compression.sparse import check_fraction, scatter_mean
from stoker_kernels.ops.sparsify import above_compress

FITS = ("exponential", "gamma", "pareto")
STAGE_SHARE = 0.25  # of the values that a stage looks at, what it leaves to the next
TOLERANCE = 0.2  # of the wanted count
EVERY = 5  # steps between looks at the counts: each waits for the device
SLACK = 1.25  # places in a message per value wanted
MOST_STAGES = 4


class SIDCo(OneRound):
    """Values above a threshold that a fitted distribution expects ``ratio`` of them to exceed.

    The magnitudes of memory plus gradient are fitted as exponential, gamma or generalised Pareto; every
    further stage fits the excess over the last threshold (as Pareto after a gamma). Where the counts
    of five steps are off by more than 20 %, a stage is added. A message has ``1.25 * ratio * n`` places,
    8 bytes each, since sizes must be equal: what exceeds them stays in the memory, places left over are zero.
    All workers receive all messages. Non-finite values make the threshold infinite: they alone
    are sent, and then forgotten.
    """

    name = "sidco"
    residual = "memory"

    def __init__(self, ratio: float = 0.01, fit: str = "exponential") -> None:
        super().__init__()
        check_fraction("ratio", ratio)
        if fit not in FITS:
            raise ValueError(f"fit must be one of {', '.join(FITS)}, got {fit!r}")
        self.ratio, self.fit = ratio, fit

    def capacity(self, n: int) -> int:
        """Return the places in a message for ``n`` values."""
        return max(1, min(n, math.ceil(SLACK * self.ratio * n)))

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the values above this step's threshold."""
        step = self._begin(name)
        n = gradient.numel()
        memory = self._memory_tensor(name, "memory", gradient)
        memory += gradient.reshape(-1).to(memory.dtype)
        reached = self._memory_tensor(name, "reached", gradient, 1)
        stages = self.memory(name).setdefault("stages", torch.ones(1, dtype=torch.int64))
        if step and step % EVERY == 0:
            counted = float(reached) / EVERY
            if abs(counted - self.ratio * n) > max(1.0, TOLERANCE * self.ratio * n):
                stages.add_(1).clamp_(max=MOST_STAGES)
            reached.zero_()
        magnitudes = memory.abs()
        wanted = max(1.0, self.ratio * n)
        threshold = fit_threshold(magnitudes, wanted, self.fit, int(stages))
        reached += (magnitudes >= threshold).sum()
        values, indices = above_compress(memory, threshold, self.capacity(n))
        return message_of(gradient, Combine.GATHER, values, indices)

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the mean of the messages."""
        return scatter_mean(messages)

    def config(self) -> dict[str, Any]:
        """Return ratio and distribution."""
        return {"ratio": self.ratio, "fit": self.fit}


def fit_threshold(magnitudes: torch.Tensor, wanted: float, fit: str, stages: int) -> torch.Tensor:
    """Fit the threshold (1,) that about ``wanted`` of the magnitudes (n,) reach; inf if one is not finite.

    Zeros are left out of the first fit: they are no part of a continuous distribution.
    """
    threshold = magnitudes.new_zeros(1)
    for stage in range(stages):
        tail = magnitudes > threshold
        count = tail.sum(dtype=magnitudes.dtype)
        share = (wanted / count).clamp(max=1.0)
        if stage + 1 < stages:
            share = share.clamp(min=STAGE_SHARE)
        kind = fit if stage == 0 or fit != "gamma" else "pareto"
        excess = torch.where(tail, magnitudes - threshold, 0.0)
        rise = _quantile(excess, tail, count, share, kind)
        threshold = torch.where(count > 0, threshold + rise, threshold)
    # Equal magnitudes fit nothing: without this they would all wait for ever.
    threshold = torch.minimum(threshold, magnitudes.max())
    return torch.where(threshold.isfinite(), threshold, float("inf"))


def _quantile(
    excess: torch.Tensor, tail: torch.Tensor, count: torch.Tensor, share: torch.Tensor, kind: str
) -> torch.Tensor:
    """Return the value that ``share`` of the fitted distribution exceeds.

    exponential  mean * ln(1 / share)
    gamma        shape a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s) with s = ln mean - mean ln; then
                 mean / a * (ln(1 / share) - ln Gamma(a)), its tail for small shares and a <= 1
    pareto       shape c = (1 - mean^2 / var) / 2, scale b = mean (1 - c): b / c * (share^-c - 1)
    """
    mean = excess.sum() / count
    surprise = -share.log()
    if kind == "exponential":
        return mean * surprise
    if kind == "gamma":
        logs = torch.where(tail, excess.clamp(min=1e-37).log(), 0.0).sum() / count
        s = (mean.log() - logs).clamp(min=1e-3)
        shape = (3.0 - s + ((s - 3.0).square() + 24.0 * s).sqrt()) / (12.0 * s)
        return (mean / shape * (surprise - torch.lgamma(shape))).clamp(min=0.0)
    variance = torch.where(tail, (excess - mean).square(), 0.0).sum() / count
    shape = 0.5 * (1.0 - mean.square() / variance)
    shape = torch.where(shape.abs() < 1e-3, 1e-3, shape)  # nearly exponential
    shape = torch.where(variance > 0, shape, 1e-3)
    return mean * (1.0 - shape) / shape * torch.expm1(shape * surprise)
