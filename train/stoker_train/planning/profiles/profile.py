"""Measured seconds of a model's passes, by which plans are costed in place of counted operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of a pass: ``fixed_s``, and ``sequence_s`` for each sequence of the micro-batch."""

    fixed_s: float
    sequence_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"Pass: {field.name} must be seconds from 0, got {value}")

    def seconds(self, sequences: int) -> float:
        """Return the seconds for a micro-batch of so many sequences."""
        return self.fixed_s + self.sequence_s * sequences


@dataclass(frozen=True, slots=True)
class Profile:
    """Passes of one layer, and of what is before and after the layers: embedding, head, loss.

    ``whole_share`` is the part of a layer's time that tensor parallelism does not divide, unless sequences
    are cut too: norms, dropout, sums. ``update_s`` is the optimizer's time for one parameter. Made by
    :func:`stoker_train.planning.profiles.profiling.profile_model`.
    """

    layer_forward: Pass
    layer_backward: Pass
    ends_forward: Pass
    ends_backward: Pass
    whole_share: float = 0.0
    update_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.whole_share <= 1.0:
            raise ValueError(f"Profile: whole_share must lie in [0, 1], got {self.whole_share}")
        if not math.isfinite(self.update_s) or self.update_s < 0:
            raise ValueError(f"Profile: update_s must be seconds from 0, got {self.update_s}")
        if self.layer_forward.seconds(1) <= 0 or self.layer_backward.seconds(1) <= 0:
            raise ValueError("Profile: a pass of a layer must take time, got 0 s")
