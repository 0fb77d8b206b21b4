"""The worth of a larger batch: AdaScale's gain, from the noise of the gradient.

With S = M / M0, the variance of the gradient of a batch of M0 (``var``) and the squared norm of the true
gradient (``sqr``), a step of batch M is worth ``gain = (var + sqr) / (var / S + sqr)`` steps of batch M0
(Johnson et al., AdaScale SGD, ICML 2020): between 1 (no noise) and S (nothing but noise). Its statistical
efficiency is ``gain / S = (phi + M0) / (phi + M)`` with the noise scale ``phi = M0 * var / sqr`` (McCandlish
et al., 2018; Pollux, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The squared norm of the true gradient, and the variance of the gradient of a batch of M0 samples.

    Raises ValueError, with the field, for what is no number or negative.
    """

    sqr: float
    var: float

    def __post_init__(self) -> None:
        for name, value in (("sqr", self.sqr), ("var", self.var)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}: it must be a number, and not negative")

    def gain(self, scale: Any) -> Floats:
        """Return how many steps of batch M0 a step of ``scale`` times M0 is worth, for any shape."""
        scale = np.asarray(scale, dtype=np.float64)
        below = self.var / scale + self.sqr
        return np.where(below > 0, (self.var + self.sqr) / np.where(below > 0, below, 1.0), 1.0)

    def efficiency(self, scale: Any) -> Floats:
        """Return the part of a sample's worth that is left in a batch of ``scale`` times M0: gain / scale."""
        return np.asarray(self.gain(scale) / np.asarray(scale, dtype=np.float64))

    def noise_scale(self, min_batch: int) -> float:
        """Return phi, in samples, up to which a larger batch is nearly all gain; inf without a signal."""
        if self.sqr > 0:
            return min_batch * self.var / self.sqr
        return math.inf if self.var > 0 else 0.0
