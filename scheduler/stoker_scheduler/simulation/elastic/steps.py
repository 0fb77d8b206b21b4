"""The steps of jobs to their shares, in no time: a cluster's state machine, and jobs that answer at once.

What a cluster does over seconds is done here between two rounds: reservations are held as they are asked for,
and every offer is accepted. The orders are those of :mod:`stoker_scheduler.core.elastic.generations`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker_scheduler.core.elastic.generations import (
    Lose,
    Offer,
    Place,
    Places,
    Preempt,
    Release,
    Reservation,
    Reserve,
    Standing,
    TakeBack,
    Withdraw,
    settle,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_scheduler.core.elastic.generations import Order

MAX_LOOKS = 1_000
"""Looks within which any set of jobs has what it is to have."""


@dataclass(slots=True)
class Steps:
    """The jobs of a study as they stand, by name."""

    standings: dict[str, Standing] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def take(
        self, targets: Mapping[str, Allocation], nodes: Mapping[str, int], now_s: float
    ) -> None:
        """Bring jobs to ``targets``, which are all that have anything; ``nodes`` are the GPUs that are there.

        Raises RuntimeError if the steps do not lead there.
        """
        self.standings = {
            name: self._of_nodes(self.standings.get(name, Standing(name, 0)), nodes)
            for name in targets
        }
        for _ in range(MAX_LOOKS):
            orders = settle(list(self.standings.values()), targets, self._free(nodes), now_s)
            if not orders:
                break
            for order in orders:
                self._obey(order)
        for name, target in targets.items():
            if Counter(dict(target)) != Counter(place.node_id for place in self.places(name)):
                raise RuntimeError(f"job {name} has {self.places(name)}, not {target}")

    def places(self, name: str) -> Places:
        """Return the places of a job."""
        return self.standings[name].places

    def _of_nodes(self, job: Standing, nodes: Mapping[str, int]) -> Standing:
        gone = tuple(place for place in job.places if place.node_id not in nodes)
        return replace(job, gone=gone) if gone else job

    def _free(self, nodes: Mapping[str, int]) -> dict[str, int]:
        used: Counter[str] = Counter()
        for job in self.standings.values():
            used.update(place.node_id for place in job.places)
            used.update(place.node_id for one in job.reservations for place in one.places or ())
        return {node_id: gpus - used[node_id] for node_id, gpus in nodes.items()}

    def _obey(self, order: Order) -> None:
        match order:
            case Reserve():
                job = self.standings[order.job_id]
                made = self._reservation(order.wanted)
                self._put(replace(job, reservations=(*job.reservations, made)))
            case Offer():
                job = self.standings[order.job_id]
                offered = set(order.places)
                kept = tuple(one for one in job.reservations if not offered & set(one.places or ()))
                self._put(
                    replace(job, places=order.places, reservations=kept, has_lost=False, offer=None)
                )
            case Lose() | Preempt() | TakeBack():
                job = self.standings[order.job_id]
                left = tuple(place for place in job.places if place not in order.places)
                self._put(replace(job, places=left, gone=(), has_lost=bool(left)))
            case Release():
                for job in list(self.standings.values()):
                    kept = tuple(one for one in job.reservations if one.group_id != order.group_id)
                    self._put(replace(job, reservations=kept))
            case Withdraw():
                self._put(replace(self.standings[order.job_id], offer=None))

    def _reservation(self, wanted: Allocation) -> Reservation:
        group_id = f"pg_{next(self._numbers)}"
        nodes = [node_id for node_id, count in wanted for _ in range(count)]
        places = tuple(Place(group_id, bundle, node_id) for bundle, node_id in enumerate(nodes))
        return Reservation(group_id, wanted, 0.0, places)

    def _put(self, job: Standing) -> None:
        self.standings[job.job_id] = replace(job, version=job.version + 1)
