"""Decisions of a controller that numbers lead to: hints for the scheduler, another batch, slow ranks.

Fed with what rank 0 reports; answers with actions for all ranks. It sends nothing itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_goodput.batches import Batch, BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_train.elastic.core.membership import Membership, SetBatch
from stoker_train.elastic.optimization.batch_choice import BatchChoice
from stoker_train.elastic.optimization.priors import Prior
from stoker_train.elastic.optimization.profile import StepProfile
from stoker_train.elastic.optimization.stragglers import Slow, Stragglers
from stoker_train.elastic.optimization.table import StepTable

if TYPE_CHECKING:
    from stoker_train.elastic.options import Scaling

__all__ = ("Decisions",)

_log = logging.getLogger(__name__)
_LEAST_STEPS = 20
"""Steps of a configuration before a batch is chosen by what they say."""


class Decisions:
    """The throughput, noise and stragglers of one job."""

    def __init__(self, scaling: Scaling, prior: Prior | None = None) -> None:
        self.scaling = scaling
        low, high = scaling.locals
        self.choice = BatchChoice(
            BatchLimits(
                min_batch=scaling.base_batch,
                max_batch=scaling.most_in_batch,
                min_local=low,
                max_local=high,
            )
        )
        prior = prior or Prior()
        self.profile = StepProfile(prior.profile())
        self._prior_noise = prior.noise
        self._stragglers: tuple[int, Stragglers] | None = None
        self._noise: Mapping[str, Any] = {}
        self._membership: Membership | None = None
        self._steps = 0
        self._looked_s = 0.0
        self.batch, self.local = scaling.base_batch, high

    def add(
        self, membership: Membership, tables: tuple[Any, ...], values: Mapping[str, Any], noise: Any
    ) -> list[Slow]:
        """Add steps of a generation; returns which ranks or nodes are found to be slow."""
        if membership is not self._membership:
            self._membership, self._steps = membership, 0
            nodes = [one.node_id for one in membership.members]
            self._stragglers = membership.generation, Stragglers(nodes)
        self._noise = noise or self._noise
        self.batch = int(values.get("batch", self.batch))
        self.local = int(values.get("local", self.local))
        slow: list[Slow] = []
        for rows in tables:
            table = StepTable(np.asarray(rows))
            if table.replicas != membership.world_size:
                continue
            self._steps += 1
            self.profile.add_table(table, len(membership.nodes))
            assert self._stragglers is not None
            slow += self._stragglers[1].add(table)
        return slow

    @property
    def noise(self) -> GradientNoise | None:
        """The noise that the replicas have measured; before that, what an earlier job had."""
        if "sqr" not in self._noise:
            return self._prior_noise
        sqr, var = float(self._noise["sqr"]), float(self._noise["var"])
        if not (math.isfinite(sqr) and math.isfinite(var)) or sqr <= 0:
            return None
        return GradientNoise(sqr, var)

    def measured(self) -> Prior:
        """Return what is worth keeping for jobs with the same code."""
        return Prior.of(self.profile.observations(), self.noise)

    def hints(self, restart_s: float | None, progress: float) -> dict[str, Any]:
        """Return what the scheduler is told, as for :meth:`stoker.train.elastic.Session.report`."""
        said: dict[str, Any] = {
            "profiled_replicas": self.profile.max_replicas,
            "batch": self.batch,
            "progress": progress,
        }
        if restart_s is not None:
            said["restart_s"] = restart_s
        params = self.profile.params
        if params is not None:
            said["params"] = {name: getattr(params, name) for name in params.__dataclass_fields__}
            said["params_error"] = self.profile.error
        noise = self.noise
        if noise is not None:
            said["grad_sqr"], said["grad_var"] = noise.sqr, noise.var
            # Above 1 with less than the base batch, which a user may ask for: the scheduler takes none.
            said["efficiency"] = min(
                1.0, float(noise.efficiency(self.batch / self.scaling.base_batch))
            )
        return said

    def out_of_memory(self, local: int) -> int | None:
        """Lower the most samples of a pass; None if nothing smaller is allowed."""
        return self.choice.limits.max_local if self.choice.out_of_memory(local) else None

    def another_batch(self, now_s: float) -> SetBatch | None:
        """Return a batch that is worth a change; looks once in ``scaling.interval_s``."""
        membership = self._membership
        if self.scaling.adapt != "batch+replicas" or membership is None:
            return None
        if now_s - self._looked_s < self.scaling.interval_s or self._steps < _LEAST_STEPS:
            return None
        self._looked_s = now_s
        params, noise = self.profile.params, self.noise
        if params is None or noise is None:
            return None
        world, nodes = membership.world_size, len(membership.nodes)
        share = max(1, math.ceil(self.batch / world))
        passes = max(1, math.ceil(share / max(1, self.local)))
        current = Batch(max(1, math.ceil(share / passes)), passes - 1)
        found = self.choice.choose(params, noise, current, nodes, world)
        if found is None:
            return None
        batch = min(found.total(world), self.scaling.most_in_batch)
        return SetBatch(batch, found.local)

    def allowed(self, batch: int) -> SetBatch:
        """Return the order for a batch that somebody asks for, kept within the limits."""
        batch = max(1, min(batch, self.scaling.most_in_batch))
        return SetBatch(batch, min(self.choice.limits.max_local, max(self.local, 1)))
