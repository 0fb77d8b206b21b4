"""The replica actors of a job, as its controller has them: how they start, and what they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import stoker
from stoker.train.elastic import Generation
from stoker_train.elastic.core import events as ev
from stoker_train.elastic.replica.actor import Replica, Work
from stoker_train.reporting_actors import ReportingActors, preloaded
from stoker_wire.messages.elastic import Replica as Place

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Slot

__all__ = ("Replicas",)

_CONCURRENCY = 8
_PRELOAD = ("torch", "torch.distributed.nn.functional", "stoker_train.elastic.replica.context")
"""Imported once per node, so that a newcomer is there in a moment."""


class Replicas(ReportingActors):
    """All replicas of a controller. ``put`` takes what they report, from any thread."""

    def __init__(
        self, work: Work, resources: Mapping[str, float], put: Callable[[Any], None]
    ) -> None:
        super().__init__("replica", put, lambda worker, why: ev.Died(0.0, worker, why))
        self._work = stoker.put(work)
        self._resources = dict(resources)

    def launch(self, worker: int, slot: Slot, *, rehearse: bool, local: int | None) -> None:
        """Start a replica in a slot."""
        place = Place(group_id=slot.group_id, bundle=slot.bundle, node_id=slot.node_id)
        (strategy,) = Generation(0, (place,), self._resources).strategies()
        needs = dict(self._resources)
        actor = stoker.remote(Replica).options(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs or None,
            scheduling_strategy=strategy,
            max_concurrency=_CONCURRENCY,
            runtime_env={"preload": preloaded(*_PRELOAD)},
        )
        self.add(worker, actor.remote(self._work, worker, rehearse, local))

    def order(self, worker: int, order: Any) -> None:
        """Give an order."""
        self.tell(worker, "order", order)

    def form(self, worker: int, form: ev.Form) -> None:
        """Have a replica form a generation."""
        self.tell(worker, "form", form)

    def interrupt(self, worker: int, generation: int) -> None:
        """Tell a replica that a generation will not go on."""
        self.tell(worker, "interrupt", generation)
