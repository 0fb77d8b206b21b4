"""The job's half: what a job measures, what it concludes, and the batch it chooses. As a trainer does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_goodput.batches import Batch, BatchLimits, best_goodputs, capped, divide
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation, error, fit
from stoker_goodput.throughput import ThroughputParams

EXPLAINED = 0.05
"""Relative error of a step time up to which it says nothing that the parameters do not."""


@dataclass(slots=True)
class Agent:
    """Measures the steps of one job, and fits what it has seen."""

    limits: BatchLimits
    always_fits: bool = False
    """Fit for each new configuration, as Pollux does, also where the last fit explains it."""
    params: ThroughputParams | None = None
    noise: GradientNoise | None = None
    profiled_replicas: int = 0
    _seen: dict[tuple[int, int, int], Observation] = field(default_factory=dict)
    _stale: bool = False
    _choice: tuple[object, Batch] | None = None

    def measured(self, observation: Observation, noise: GradientNoise) -> None:
        """Take in the time of a step; the first measurement of a configuration stays."""
        self.noise = noise
        self.profiled_replicas = max(self.profiled_replicas, observation.replicas)
        key = observation.nodes, observation.replicas, observation.local_batch
        if key in self._seen:
            return
        self._stale = self._stale or self.always_fits or self._is_news(observation)
        self._seen[key] = observation

    def refit(self) -> None:
        """Fit again, if something was measured that the parameters do not explain."""
        if self._stale:
            self.params = fit(self._seen.values())
            self._stale = False

    def choose(self, nodes: int, replicas: int) -> Batch:
        """Return the batch with the best goodput; as large as M0 before anything is known."""
        if self.params is None or self.noise is None:
            wanted = max(self.limits.min_batch, self.limits.min_local * replicas)
            return divide(wanted, replicas, self.limits)
        key = (self.params, self.noise, nodes, replicas)
        if self._choice is None or self._choice[0] != key:
            best = best_goodputs(self.params, self.noise, self.limits, (nodes,), (replicas,))
            batch = best.batch(0)
            if batch is None:
                return divide(self.limits.max_batch, replicas, self.limits)
            self._choice = key, capped(batch, replicas, self.limits)
        return self._choice[1]

    def _is_news(self, observation: Observation) -> bool:
        """Return whether a fit is due: a new kind of placement or batch, or a time that was not predicted."""
        if self.params is None:
            return True
        seen = self._seen.values()
        kinds = {_kind(one) for one in seen}
        if _kind(observation) not in kinds:
            return True
        batches = {one.local_batch for one in seen}
        if len(batches) == 1 and observation.local_batch not in batches:
            return True
        return error(self.params, [observation]) > EXPLAINED


def _kind(observation: Observation) -> tuple[bool, int]:
    """Return what pins parameters: across nodes or not, and one, two or more replicas."""
    return observation.nodes > 1, min(observation.replicas, 3)
