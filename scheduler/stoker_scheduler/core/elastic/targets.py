"""The targets of jobs between two rounds: what the last one decided, and what has come since.

``settle`` (:mod:`.generations`) remembers nothing; what it has to know besides a job's standing is here. The
controller keeps one for its term. After a change of schedulers the first round decides anew: of a job that
asks for spares then, what it has beyond its target counts as lent. Pure: no clock, no IO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stoker_scheduler.core.elastic.allocations import Allocation, replicas_of
from stoker_scheduler.core.elastic.generations import Places, Standing, allocation_of, split


@dataclass(slots=True)
class Targets:
    """Targets by job: ``decide`` at each round, and ``seen`` for each standing before ``settle``."""

    by_job: dict[str, Allocation] = field(default_factory=dict)
    _shrinking: set[str] = field(default_factory=set)
    """Jobs from which a round takes replicas that they have still."""

    def decide(self, targets: Mapping[str, Allocation]) -> None:
        """Take the targets of a round."""
        fewer = {
            job_id
            for job_id, target in targets.items()
            if replicas_of(target) < replicas_of(self.by_job.get(job_id, ()))
        }
        self._shrinking = (self._shrinking & targets.keys()) | fewer
        self.by_job = dict(targets)

    def took_back(self, job_id: str, left: Places) -> None:
        """Have a job stay where it is, as some of its places were taken back: the next round decides anew.

        With as many replicas as it was to have at most, those that it was to have first. Else the place that
        was given back, which is free now, were reserved for it again, and a newcomer had to go back to it.
        """
        target = self.by_job.get(job_id)
        if target is None:
            return
        kept = split(left, target)[0]
        kept += tuple(place for place in left if place not in kept)
        stays = set(kept[: replicas_of(target)])
        self.by_job[job_id] = allocation_of(tuple(place for place in left if place in stays))

    def seen(self, job: Standing) -> Standing:
        """Return a job as ``settle`` is to see it: it keeps no place as lent that a round takes from it."""
        if job.job_id not in self._shrinking:
            return job
        if len(job.places) <= replicas_of(self.by_job[job.job_id]):
            self._shrinking.discard(job.job_id)
            return job
        return replace(job, spares=0)
