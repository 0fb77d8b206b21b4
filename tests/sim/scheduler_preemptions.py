"""Preemptions that are checked as they begin: nobody is preempted whose end is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.preemptions import Preemptions
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.feasibility import RESOURCE_RULES, first_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements


class CheckedPreemptions(Preemptions):
    """Preemptions of which each has no victim too many."""

    __slots__ = ()

    def begin(
        self,
        requirements: Requirements | Gang,
        victims: Iterable[LeaseState],
        makes_room: tuple[tuple[NodeInfo, Requirements], ...],
    ) -> None:
        """Add one, of which every victim is needed."""
        victims = list(victims)
        if not isinstance(requirements, Gang) and not requirements.reads:
            ((place, _),) = makes_room
            self._check(place, requirements, [one for one in victims if one.place is place])
        super().begin(requirements, victims, makes_room)

    def _check(self, place: NodeInfo, requirements: Requirements, there: list[LeaseState]) -> None:
        assert there, f"nobody ends on {place.node_id}, where there is to be room"
        for spared in there:
            if spared.kind is Kind.BUNDLE:
                continue  # it may end with its gang, not for what it has here
            trial = self.after(place)
            for lease in there:
                if lease is not spared:
                    trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
            fits = first_obstacle(trial, requirements, RESOURCE_RULES) is None
            assert not fits, f"{spared.lease_id} is preempted for nothing on {place.node_id}"
