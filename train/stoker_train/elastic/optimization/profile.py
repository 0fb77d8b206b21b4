"""The speed of a job's steps: medians by configuration, and the model that is fitted to them.

The controller adds every step's table to it and asks for the parameters; the scheduler gets these as hints.
What was never run is assumed to scale perfectly (:mod:`stoker_goodput.fitting`), so that it is tried.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_goodput import fitting
from stoker_goodput.fitting import Observation

if TYPE_CHECKING:
    from stoker_goodput.throughput import ThroughputParams
    from stoker_train.elastic.optimization.table import StepTable

WINDOW = 64
"""The steps of a configuration that its median is of."""
LEAST = 3
"""The steps of a configuration that make an observation."""
HEAVIEST = 8
"""The steps from which on an observation weighs no more: then the error is the model's."""
SMALLEST_CHANGE = 0.01
"""A part of a median, below which its change is none."""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""The standard error of a median of n normal values is 1.2533 sigma / sqrt(n); sigma is 1.4826 MAD."""

Configuration = tuple[int, int, int]
"""Nodes, replicas, and the largest local batch of a pass."""


@dataclass(slots=True)
class _Times:
    """The steps of one configuration, in seconds; ``count`` of them all, also of those no longer kept."""

    passes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    fitted: tuple[float, float] | None = None
    """The medians that the last fit had."""

    @property
    def medians(self) -> tuple[float, float]:
        return float(np.median(self.passes)), float(np.median(self.steps))

    @property
    def changed(self) -> bool:
        """Whether a median moved since the fit by more than its own error."""
        if self.fitted is None:
            return True
        pairs = zip(self.medians, self.fitted, (self.passes, self.steps), strict=True)
        return any(abs(now - then) > _error(now, values) for now, then, values in pairs)


class StepProfile:
    """Measured steps by configuration, and their :class:`ThroughputParams`.

    ``prior`` are observations of earlier jobs with the same code: each counts once, until this job has
    measured the same configuration itself.
    """

    def __init__(self, prior: Iterable[Observation] = ()) -> None:
        self.prior = tuple(prior)
        self._times: dict[Configuration, _Times] = {}
        self._params: ThroughputParams | None = None
        self._rank_count = 0
        self.fits = 0
        """How often the model was fitted."""

    def add(
        self, nodes: int, replicas: int, local_batch: int, accumulation_s: float, step_s: float
    ) -> None:
        """Add a step: the seconds of a pass that accumulates, and of the one with the exchange.

        What is no positive time is ignored.
        """
        if not (0 < accumulation_s < math.inf and 0 < step_s < math.inf):
            return
        times = self._times.setdefault((nodes, replicas, local_batch), _Times())
        times.passes.append(accumulation_s)
        times.steps.append(step_s)
        times.count += 1
        self._rank_count = max(self._rank_count, replicas)

    def add_table(self, table: StepTable, nodes: int) -> None:
        """Add a step from its table: s + 1 passes, of which the last exchanges.

        ``T_acc`` is the median over the ranks of compute / passes, ``T_step`` the median of compute +
        exchange less ``s * T_acc``. Uneven shares count as the largest local batch: for it the others wait.
        """
        compute, passes = table.column("compute_s"), table.column("passes")
        works = (table.column("share") > 0) & (compute > 0) & (passes > 0)
        if not works.any():
            return
        accumulation_s = float(np.median(compute[works] / passes[works]))
        whole_s = float(np.median((compute + table.column("exchange_s"))[works]))
        before = float(np.median(passes[works])) - 1
        step_s = max(accumulation_s, whole_s - before * accumulation_s)
        local = float((table.column("share")[works] / passes[works]).max())
        self.add(nodes, table.replicas, max(1, math.ceil(local - 1e-9)), accumulation_s, step_s)

    @property
    def max_replicas(self) -> int:
        """The most replicas that it ever ran with, in this job or those before."""
        return max([self._rank_count, *(one.replicas for one in self.prior)])

    def observations(self) -> tuple[Observation, ...]:
        """Return the medians of every configuration with enough steps, and what earlier jobs add."""
        own = {key: times for key, times in self._times.items() if len(times.steps) >= LEAST}
        measured = [Observation(*key, *times.medians) for key, times in own.items()]
        before = [one for one in self.prior if _key(one) not in own]
        return (*measured, *before)

    @property
    def params(self) -> ThroughputParams | None:
        """The parameters that explain the steps, fitted anew if a median has changed; None before any."""
        own = {key: times for key, times in self._times.items() if len(times.steps) >= LEAST}
        if self._params is not None and not any(times.changed for times in own.values()):
            return self._params
        weighted = [
            one
            for one in self.observations()
            for _ in range(min(HEAVIEST, own[_key(one)].count) if _key(one) in own else 1)
        ]
        if not weighted:
            return None
        self._params = fitting.fit(weighted)
        self.fits += 1
        for times in own.values():
            times.fitted = times.medians
        return self._params

    @property
    def error(self) -> float:
        """The largest relative error of the model on what was measured; 0 before the first fit."""
        return fitting.error(self._params, self.observations()) if self._params is not None else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all steps that are kept, as plain values."""
        return {
            "times": [
                [*key, times.count, list(times.passes), list(times.steps)]
                for key, times in self._times.items()
            ],
            "prior": [list(astuple(one)) for one in self.prior],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.prior = tuple(Observation(*one) for one in state["prior"])
        self._times, self._params, self._rank_count = {}, None, 0
        for nodes, replicas, local, count, passes, steps in state["times"]:
            times = self._times.setdefault((nodes, replicas, local), _Times(count=count))
            times.passes.extend(passes)
            times.steps.extend(steps)
            self._rank_count = max(self._rank_count, replicas)


def _key(one: Observation) -> Configuration:
    return one.nodes, one.replicas, one.local_batch


def _error(median: float, values: deque[float]) -> float:
    deviation = float(np.median(np.abs(np.asarray(values) - median)))
    return max(SMALLEST_CHANGE * median, _MEDIAN_ERROR * deviation / math.sqrt(len(values)))
