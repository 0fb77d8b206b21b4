"""The batch that makes most of an allocation: of totals in geometric progression, that of the best goodput.

Pollux's rule (OSDI 2021, section 3.3): a job on K replicas runs s passes that only accumulate and one that
exchanges gradients, each of a local batch b, so a step has ``M = K * b * (s + 1)`` samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from stoker_goodput.throughput import Floats, ThroughputParams

if TYPE_CHECKING:
    from stoker_goodput.efficiency import GradientNoise

CANDIDATES = 50
_ROUNDING = 1e-8


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The batches that a job may run with, in samples: in all from ``min_batch`` (M0, the user's own) on.

    Raises ValueError, with the field, for limits that no batch keeps.
    """

    min_batch: int
    max_batch: int
    min_local: int
    max_local: int

    def __post_init__(self) -> None:
        for name in ("min_batch", "min_local"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.min_batch > self.max_batch:
            raise ValueError(
                f"min_batch is {self.min_batch}, more than max_batch, {self.max_batch}"
            )
        if self.min_local > self.max_local:
            raise ValueError(
                f"min_local is {self.min_local}, more than max_local, {self.max_local}"
            )
        if self.min_local > self.max_batch:
            raise ValueError(
                f"min_local is {self.min_local}, more than max_batch, {self.max_batch}"
            )

    @property
    def max_replicas(self) -> int:
        """The most replicas that have a local batch each."""
        return self.max_batch // self.min_local


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step: ``local`` on each replica, in ``accumulated`` passes and a last one."""

    local: int
    accumulated: int

    def total(self, replicas: int) -> int:
        """Return M, the samples of a whole step."""
        return replicas * self.local * (self.accumulated + 1)


@dataclass(frozen=True, slots=True)
class Goodputs:
    """The best goodput of each of some allocations, in samples of M0's worth per second, and its batch.

    Where no batch is allowed, the goodput is 0 and the local batch too.
    """

    goodput: Floats
    local: Floats
    accumulated: Floats

    def batch(self, index: int) -> Batch | None:
        """Return the batch of an allocation, or None if it has none."""
        local = int(self.local[index])
        return Batch(local, int(self.accumulated[index])) if local else None


def divide(total: float, replicas: int, limits: BatchLimits) -> Batch:
    """Return the batch that is nearest to ``total`` samples on ``replicas``, not above the most.

    One replica accumulates where it runs more than M0: a single gradient gives no estimate of the noise.
    """
    share = _ceil(total / replicas)
    accumulated = _ceil(share / limits.max_local) - 1
    if replicas == 1 and total > limits.min_batch:
        accumulated = max(1, accumulated)
    return capped(Batch(_ceil(share / (accumulated + 1)), accumulated), replicas, limits)


def capped(batch: Batch, replicas: int, limits: BatchLimits) -> Batch:
    """Return a batch whose total is not above the most."""
    passes = batch.accumulated + 1
    return Batch(min(batch.local, limits.max_batch // (replicas * passes)), batch.accumulated)


def best_goodputs(
    params: ThroughputParams,
    noise: GradientNoise,
    limits: BatchLimits,
    nodes: Sequence[int],
    replicas: Sequence[int],
) -> Goodputs:
    """Return the best goodput of each allocation of so many replicas on so many nodes."""
    table = _candidates(limits, tuple(nodes), tuple(replicas))
    passes = params.accumulation_time(table.local)
    step = params.step_time(table.nodes, table.replicas, table.local)
    seconds = table.accumulated * passes + step
    goodput = table.total * noise.efficiency(table.scale) / seconds
    goodput = np.where(table.allowed, goodput, 0.0)
    best = np.argmax(goodput, axis=1)
    rows = np.arange(len(best))
    found = goodput[rows, best]
    local = np.where(found > 0, table.local[rows, best], 0.0)
    return Goodputs(found, local, table.accumulated[rows, best])


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The batches to try, with what they come to: rows are allocations, columns total batches."""

    nodes: Floats
    replicas: Floats
    total: Floats
    scale: Floats
    local: Floats
    accumulated: Floats
    allowed: Floats


@lru_cache(maxsize=4096)
def _candidates(
    limits: BatchLimits, nodes: tuple[int, ...], replicas: tuple[int, ...]
) -> _Candidates:
    count = np.asarray(replicas, dtype=np.float64)[:, None]
    least = np.maximum(limits.min_batch, limits.min_local * count)
    within = least <= limits.max_batch
    least = np.minimum(least, limits.max_batch)
    total = np.geomspace(least[:, 0], limits.max_batch, CANDIDATES, axis=1)
    share = total / count
    accumulated = np.ceil(share / limits.max_local - _ROUNDING) - 1
    alone = (count == 1) & (share > limits.min_batch)
    accumulated = np.where(alone, np.maximum(accumulated, 1), accumulated)
    local = np.ceil(share / (accumulated + 1) - _ROUNDING)
    allowed = within & (local >= limits.min_local) & (local <= limits.max_local)
    batch = local * (accumulated + 1) * count
    return _Candidates(
        nodes=np.asarray(nodes, dtype=np.float64)[:, None],
        replicas=count,
        total=batch,
        scale=batch / limits.min_batch,
        local=local,
        accumulated=accumulated,
        allowed=allowed,
    )


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)
