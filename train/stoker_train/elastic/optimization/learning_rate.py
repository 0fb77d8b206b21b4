"""Rules for the learning rate when the batch is not M0: by which factor it grows.

Every rank applies the factor to its optimizer's own schedule; all have the same numbers, so the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

RULES = ("adascale", "sqrt", "linear", "none")
LrRule = Literal["adascale", "sqrt", "linear", "none"] | Callable[[float, float], float]
"""A name, or a function of the scale ``S = M / M0`` and AdaScale's gain, which returns the factor."""


def lr_factor(rule: LrRule, batch: float, base_batch: float, gain: float = 1.0) -> float:
    """Return the factor of the learning rate for ``batch`` samples, with ``S = batch / base_batch``.

    ``"adascale"``: ``gain = (var + sqr) / (var / S + sqr)``, for SGD (Johnson et al., ICML 2020).
    ``"sqrt"``: ``sqrt(S)``, for Adam and its kin (Krizhevsky 2014; Malladi et al., NeurIPS 2022).
    ``"linear"``: ``S`` (Goyal et al. 2017). ``"none"``: 1. A function gets S and the gain.

    Raises ValueError for another rule, or a function's answer that is no positive number.
    """
    scale = batch / base_batch
    if callable(rule):
        factor = float(rule(scale, gain))
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"lr returned {factor} for scale {scale:g}: it must be a number above 0"
            )
        return factor
    if rule == "adascale":
        return gain
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "linear":
        return scale
    if rule == "none":
        return 1.0
    raise ValueError(f"lr is {rule!r}: it must be one of {', '.join(RULES)}, or a function")
