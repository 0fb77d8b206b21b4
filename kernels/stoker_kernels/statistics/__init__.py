"""Statistics of a training run from the sizes of its gradients: noise scale, AdaScale, efficiency.

These numbers say how large a batch still pays, which is what a scheduler asks before it
gives a job more GPUs. They cost no pass of their own where an optimizer of ours runs (it emits the
square sums), and nothing here waits for the device until a result is read.
"""

from __future__ import annotations

from stoker_kernels.statistics.adascale import AdaScale, statistical_efficiency
from stoker_kernels.statistics.noise_scale import GradientNoiseScale, estimate
from stoker_kernels.statistics.square_sums import (
    adam_denominators,
    optimizer_square_sums,
    square_sums,
)

__all__ = (
    "AdaScale",
    "GradientNoiseScale",
    "adam_denominators",
    "estimate",
    "optimizer_square_sums",
    "square_sums",
    "statistical_efficiency",
)
