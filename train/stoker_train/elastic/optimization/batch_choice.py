"""The choice of a batch for the replicas that a job has, at the end of an epoch or an interval.

The controller asks; orders carry the answer. The search itself is
:func:`stoker_goodput.batches.best_goodputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker_goodput.batches import Batch, BatchLimits, best_goodputs

if TYPE_CHECKING:
    from stoker_goodput.efficiency import GradientNoise
    from stoker_goodput.throughput import ThroughputParams

LEAST_GAIN = 0.05
"""A change costs a step's caches, and the prediction has an error: smaller gains are not worth it."""
RETREAT = 0.9
"""The part of a local batch that is tried after it did not fit in memory."""


class BatchChoice:
    """The best local batch and number of accumulating passes, within limits that memory may lower."""

    def __init__(self, limits: BatchLimits, least_gain: float = LEAST_GAIN) -> None:
        self.limits = limits
        self.least_gain = least_gain
        self.out_of_memory_count = 0

    def choose(
        self,
        params: ThroughputParams,
        noise: GradientNoise,
        current: Batch | None,
        nodes: int,
        replicas: int,
    ) -> Batch | None:
        """Return the batch of the best goodput if that is ``least_gain`` above the present one's.

        None: stay. A ``current`` beyond the limits (None too) is changed for whatever is best.
        """
        best = best_goodputs(params, noise, self.limits, [nodes], [replicas])
        batch = best.batch(0)
        if batch is None or batch == current:
            return None
        if current is not None and self.allows(current, replicas):
            now = self.goodput(params, noise, current, nodes, replicas)
            if float(best.goodput[0]) < now * (1.0 + self.least_gain):
                return None
        return batch

    def goodput(
        self,
        params: ThroughputParams,
        noise: GradientNoise,
        batch: Batch,
        nodes: int,
        replicas: int,
    ) -> float:
        """Return the goodput of a batch, in samples of M0's worth per second."""
        total = batch.total(replicas)
        seconds = batch.accumulated * params.accumulation_time(batch.local)
        seconds = seconds + params.step_time(nodes, replicas, batch.local)
        efficiency = noise.efficiency(total / self.limits.min_batch)
        return float(total * efficiency / seconds)

    def allows(self, batch: Batch, replicas: int) -> bool:
        """Tell whether the limits allow a batch."""
        local = self.limits.min_local <= batch.local <= self.limits.max_local
        return local and batch.total(replicas) <= self.limits.max_batch

    def out_of_memory(self, local: int) -> bool:
        """Take note that a pass of ``local`` samples did not fit; False if nothing smaller is allowed.

        The limit becomes 0.9 of it, at least one sample less.
        """
        self.out_of_memory_count += 1
        lower = min(local - 1, int(local * RETREAT))
        if lower < self.limits.min_local:
            return False
        if lower < self.limits.max_local:
            self.limits = replace(self.limits, max_local=lower)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the limit that memory has set."""
        return {"max_local": self.limits.max_local, "out_of_memory": self.out_of_memory_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; limits of the user that are lower by now hold."""
        local = min(int(state["max_local"]), self.limits.max_local)
        self.limits = replace(self.limits, max_local=max(local, self.limits.min_local))
        self.out_of_memory_count = int(state["out_of_memory"])
