"""The pace of the noise's measurement: so rare that it takes a small part of the training's time.

A function of the tables that all ranks have, and a part of the state: every rank measures in the same steps,
also one that has joined, or gone back to a commit. :class:`.noise.NoiseScale` adds the tables; the replica's
step asks. It reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_train.elastic.optimization.table import StepTable

__all__ = ("BUDGET", "MeasurementPace")

BUDGET = 0.005
"""The part of a step's time that its measurement may take, over many steps."""
RAREST = 64
_KEPT = 5
_CALMER = 0.7
"""It becomes more frequent only where that would take this part of the budget: it does not swing."""


class MeasurementPace:
    """Of ``every`` tables one holds a measurement: a power of 2, by medians of its cost and of the steps.

    Which one does not depend on what it would show, so that the estimate stays unbiased. Tables are counted,
    not steps: where ranks are rarely in touch, what is measured in between reaches nobody.
    """

    def __init__(self, budget: float = BUDGET) -> None:
        self.budget = budget
        self.every = 1
        self._tables = 0
        self._costs: list[float] = []
        self._steps: list[float] = []

    def is_due(self, ahead: int = 0) -> bool:
        """Return whether the next table, or the one ``ahead`` of it, is to hold a measurement."""
        return (self._tables + ahead) % self.every == 0

    def add(self, table: StepTable) -> None:
        """Take the seconds out of a table: those of the slowest rank."""
        self._tables += 1
        cost_s = float(table.column("noise_s").max())
        step_s = max(map(sum, zip(*(table.column(name) for name in _PHASES), strict=True)))
        if cost_s > 0:
            self._costs = [*self._costs, cost_s][-_KEPT:]
        if step_s > 0:
            self._steps = [*self._steps, step_s][-_KEPT:]
        if len(self._costs) < _KEPT or not self._steps:
            return
        part = median(self._costs) / median(self._steps) / self.budget
        if part > self.every:
            self.every = _power(part)
        else:
            self.every = min(self.every, _power(part / _CALMER))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain values."""
        return {
            "every": self.every,
            "tables": self._tables,
            "costs": list(self._costs),
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.every, self._tables = int(state["every"]), int(state["tables"])
        self._costs, self._steps = list(state["costs"]), list(state["steps"])


_PHASES = ("compute_s", "exchange_s", "data_s")


def _power(part: float) -> int:
    """Return the least power of 2 that is not below ``part``, from 1 to RAREST."""
    return int(min(RAREST, 2 ** math.ceil(math.log2(max(1.0, part)))))
