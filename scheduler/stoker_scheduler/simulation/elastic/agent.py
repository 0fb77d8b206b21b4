"""The job's half: what a job measures, what it concludes, and the batch it chooses. As a trainer does it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stoker_goodput.batches import Batch, BatchLimits, best_goodputs, capped, divide
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import TOLERANCE, Observation, error, fit
from stoker_goodput.throughput import ThroughputParams

EXPLAINED = 0.05
"""Relative error of a step time up to which it says nothing that the parameters do not."""
MOVED = 0.03
"""Part by which the mean of a configuration's times moves before all are fitted again."""


@dataclass(slots=True)
class Agent:
    """Measures the steps of one job, and fits what it has seen."""

    limits: BatchLimits
    as_pollux: bool = False
    """Fit for each new configuration by Pollux's own loss; the first measurement of each stays."""
    params: ThroughputParams | None = None
    noise: GradientNoise | None = None
    profiled_replicas: int = 0
    _seen: dict[tuple[int, int, int], Observation] = field(default_factory=dict)
    _times: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """How often each configuration was measured."""
    _fitted: dict[tuple[int, int, int], Observation] = field(default_factory=dict)
    """What the parameters were fitted to."""
    _stale: bool = False
    _choice: tuple[object, Batch] | None = None

    def measured(self, observation: Observation, noise: GradientNoise, speed: float = 1.0) -> None:
        """Take in the time of a step; a configuration counts once, with the mean of its times.

        ``speed`` is how many times as fast as the reference, of which its parameters are, its GPUs compute.
        """
        self.noise = noise
        if speed != 1.0:
            observation = _of_reference(observation, speed)
        self.profiled_replicas = max(self.profiled_replicas, observation.replicas)
        key = observation.nodes, observation.replicas, observation.local_batch
        if key not in self._seen:
            self._stale = self._stale or self.as_pollux or self._is_news(observation)
            self._seen[key], self._times[key] = observation, 1
        elif not self.as_pollux:
            self._times[key] += 1
            self._seen[key] = _mean(self._seen[key], observation, 1 / self._times[key])
            self._stale = self._stale or _moved(self._fitted.get(key), self._seen[key])

    def refit(self) -> None:
        """Fit again, if something was measured that the parameters do not explain."""
        if self._stale:
            tolerance = 0.0 if self.as_pollux else TOLERANCE
            self.params = fit(self._seen.values(), tolerance)
            self._fitted = dict(self._seen)
            self._stale = False

    def choose(self, nodes: int, replicas: int, speed: float = 1.0) -> Batch:
        """Return the batch with the best goodput; as large as M0 before anything is known."""
        if self.params is None or self.noise is None:
            wanted = max(self.limits.min_batch, self.limits.min_local * replicas)
            return divide(wanted, replicas, self.limits)
        key = (self.params, self.noise, nodes, replicas, speed)
        if self._choice is None or self._choice[0] != key:
            params = self.params if speed == 1.0 else self.params.at_speed(speed)
            best = best_goodputs(params, self.noise, self.limits, (nodes,), (replicas,))
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


def _of_reference(observation: Observation, speed: float) -> Observation:
    """Return a measurement as the reference would have taken it: the exchange takes as long."""
    exchange_s = max(0.0, observation.step_s - observation.accumulation_s)
    passes_s = observation.accumulation_s * speed
    return replace(observation, accumulation_s=passes_s, step_s=passes_s + exchange_s)


def _mean(mean: Observation, another: Observation, part: float) -> Observation:
    """Return a mean into which another measurement goes with its part."""
    return replace(
        mean,
        accumulation_s=mean.accumulation_s + part * (another.accumulation_s - mean.accumulation_s),
        step_s=mean.step_s + part * (another.step_s - mean.step_s),
    )


def _moved(before: Observation | None, mean: Observation) -> bool:
    """Return whether a mean is no longer what was fitted."""
    if before is None:
        return False
    step = abs(mean.step_s / before.step_s - 1)
    return max(step, abs(mean.accumulation_s / before.accumulation_s - 1)) > MOVED


def _kind(observation: Observation) -> tuple[bool, int]:
    """Return what pins parameters: across nodes or not, and one, two or more replicas."""
    return observation.nodes > 1, min(observation.replicas, 3)
