"""Tables of speedups by count of GPUs, which are computed again when a job has measured something new."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stoker_goodput.batches import best_goodputs
from stoker_goodput.throughput import Floats

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.jobs import Hints


@dataclass(slots=True)
class SpeedupTables:
    """The tables of the jobs of a policy. They only save time: any can be computed again."""

    _known: dict[str, dict[float, tuple[object, Floats, float]]] = field(default_factory=dict)
    """Job -> speed of a type of GPUs -> what it was computed from, the speedups, and what they are over."""

    def keep(self, job_ids: Iterable[str]) -> None:
        """Forget the tables of all other jobs."""
        self._known = {name: self._known[name] for name in job_ids if name in self._known}

    def of(
        self, job_id: str, hints: Hints, counts: Sequence[int], size: int, speed: float = 1.0
    ) -> Floats | None:
        """Return how much faster a job is on each count than on the first, on the fewest nodes of ``size``.

        On GPUs that compute ``speed`` times as fast as the reference, of which it has the first count then.
        0 where it has no batch, None for a job that has measured nothing.
        """
        if hints.params is None or hints.noise is None:
            return None
        key = (hints.params, hints.noise, hints.limits, size, tuple(counts))
        tables = self._known.setdefault(job_id, {})
        known = tables.get(speed)
        if known is None or known[0] != key:
            nodes = [-(-count // size) for count in counts]
            params = hints.params if speed == 1.0 else hints.params.at_speed(speed)
            found = best_goodputs(params, hints.noise, hints.limits, nodes, counts).goodput
            over = found
            if speed != 1.0:
                over = best_goodputs(hints.params, hints.noise, hints.limits, nodes, counts).goodput
            positive = over[over > 0]
            first = float(positive[0]) if len(positive) else 0.0
            speedups = found / first if first else np.zeros(len(counts))
            known = tables[speed] = (key, speedups, first)
        return known[1]

    def goodput(self, job_id: str) -> float:
        """Return the goodput that the speedups of a job are over; 0 where nothing is known of it."""
        return next((first for _, _, first in self._known.get(job_id, {}).values()), 0.0)
