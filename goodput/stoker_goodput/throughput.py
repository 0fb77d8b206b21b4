"""The time of a step: seven parameters, which a few measured steps determine.

The model is Pollux's (Qiao et al., OSDI 2021, section 3.2). For K replicas on N nodes, each with a local
batch of b samples:

- ``T_acc = alpha_c + beta_c * b``, a pass forward and backward that only accumulates;
- ``T_net``, the exchange of gradients: 0 for K = 1, ``alpha_r + beta_r * (K - 2)`` within one node,
  ``alpha_n + beta_n * (K - 2)`` across nodes;
- ``T_step = (T_acc**gamma + T_net**gamma) ** (1 / gamma)``, a pass with the exchange: gamma = 1 overlaps
  nothing, a large one all;
- ``T = s * T_acc + T_step``, a whole step with s passes that only accumulate before it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TINY = 1e-8
"""Stands for 0 where a logarithm or a power is taken."""
NAMES = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
MAX_GAMMA = 10.0


@dataclass(frozen=True, slots=True)
class ThroughputParams:
    """The parameters of a job, in seconds; ``beta_c`` per sample, ``beta_n`` and ``beta_r`` per replica.

    Raises ValueError, with the field, for what is no number, negative, or a gamma outside [1, 10].
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value in zip(NAMES, astuple(self), strict=True):
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}: it must be a number, and not negative")
        if not 1.0 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f"gamma is {self.gamma}: it must be from 1 to {MAX_GAMMA:g}")

    def at_speed(self, speed: float) -> ThroughputParams:
        """Return the parameters on GPUs that compute ``speed`` times as fast, with the same network."""
        return replace(self, alpha_c=self.alpha_c / speed, beta_c=self.beta_c / speed)

    def accumulation_time(self, local_batch: Any) -> Floats:
        """Return T_acc, in seconds, for local batches of any shape."""
        return np.asarray(self.alpha_c + self.beta_c * np.asarray(local_batch, dtype=np.float64))

    def network_time(self, nodes: Any, replicas: Any) -> Floats:
        """Return T_net, in seconds, for counts of nodes and replicas of one shape."""
        nodes, replicas = np.asarray(nodes), np.asarray(replicas, dtype=np.float64)
        more = np.maximum(replicas - 2, TINY)
        across, within = self.alpha_n + self.beta_n * more, self.alpha_r + self.beta_r * more
        return np.where(nodes > 1, across, np.where(replicas > 1, within, TINY))

    def step_time(self, nodes: Any, replicas: Any, local_batch: Any) -> Floats:
        """Return T_step, in seconds: a pass with the exchange of gradients. The shapes broadcast."""
        return overlapped(
            self.accumulation_time(local_batch), self.network_time(nodes, replicas), self.gamma
        )


def overlapped(accumulation: Floats, network: Floats, gamma: float) -> Floats:
    """Return ``(T_acc**gamma + T_net**gamma) ** (1 / gamma)``, without overflow."""
    longer = np.maximum(accumulation, network)
    shorter = np.minimum(accumulation, network)
    ratio = shorter / np.maximum(longer, TINY)
    return np.asarray(longer * (1.0 + ratio**gamma) ** (1.0 / gamma))
