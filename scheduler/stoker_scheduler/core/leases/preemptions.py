"""The preemptions under way: leases that are to end, and what is to have their room.

Found by the requirements that they are for and by the places that they concern, so that a look costs what is
found there, not all that there is. One is over when the last of its victims is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stoker_scheduler.core.leases.lease import LeaseState
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.requirements import Requirements

PlaceKey = tuple[str, str]


@dataclass(slots=True)
class Preemption:
    """Leases that are to end, and the requirements that are to have their room, by place."""

    requirements: Requirements | Gang
    victims: dict[str, LeaseState]
    makes_room: tuple[tuple[NodeInfo, Requirements], ...]
    places: tuple[PlaceKey, ...]
    """Those of the victims, and those where the room is."""


class Preemptions:
    """All preemptions under way; each makes room for one more lease, or gang, of its requirements."""

    __slots__ = ("_at", "_next", "_of", "_with")

    def __init__(self) -> None:
        self._next = 0
        self._of: dict[Requirements | Gang, dict[int, Preemption]] = {}
        self._at: dict[PlaceKey, dict[int, Preemption]] = {}
        self._with: dict[str, list[int]] = {}
        """Victim -> the numbers of its preemptions: a gang ends whole, whoever has asked for a part of it."""

    def count(self, requirements: Requirements | Gang) -> int:
        """Return how many make room for ``requirements``."""
        return len(self._of.get(requirements, ()))

    def count_at(self, place: NodeInfo) -> int:
        """Return how many concern ``place``."""
        return len(self._at.get(_key(place), ()))

    def victims(self, requirements: Requirements | Gang) -> dict[str, None]:
        """Return the leases that are to end for ``requirements`` and have not ended yet."""
        under_way = self._of.get(requirements, {}).values()
        return {lease_id: None for one in under_way for lease_id in one.victims}

    def begin(
        self,
        requirements: Requirements | Gang,
        victims: Iterable[LeaseState],
        makes_room: tuple[tuple[NodeInfo, Requirements], ...],
    ) -> None:
        """Add one."""
        by_id = {lease.lease_id: lease for lease in victims}
        concerned = [
            *(lease.place for lease in by_id.values()),
            *(place for place, _ in makes_room),
        ]
        places = tuple(dict.fromkeys(map(_key, concerned)))
        number, self._next = self._next, self._next + 1
        one = Preemption(requirements, by_id, makes_room, places)
        self._of.setdefault(requirements, {})[number] = one
        for place in places:
            self._at.setdefault(place, {})[number] = one
        for lease_id in by_id:
            self._with.setdefault(lease_id, []).append(number)

    def ended(self, lease: LeaseState) -> None:
        """Count the end of a lease, which may be a victim."""
        for number in self._with.pop(lease.lease_id, ()):
            one = self._at[_key(lease.place)][number]
            del one.victims[lease.lease_id]
            if not one.victims:
                _discard(self._of, one.requirements, number)
                for place in one.places:
                    _discard(self._at, place, number)

    def after(
        self, place: NodeInfo, ends: Callable[[LeaseState], bool] = lambda lease: True
    ) -> NodeInfo:
        """Return a copy of ``place`` as it will be when those victims are gone of which ``ends`` says so.

        The room of a preemption is taken there once all its victims are gone.
        """
        trial = place.copy()
        freed: dict[str, None] = {}
        for one in self._at.get(_key(place), {}).values():
            gone = [lease for lease in one.victims.values() if ends(lease)]
            for lease in gone:
                if lease.place is place and lease.lease_id not in freed:
                    freed[lease.lease_id] = None
                    trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
            if len(gone) < len(one.victims):
                continue
            for where, requirements in one.makes_room:
                gpus = trial.choose(requirements) if where is place else None
                if gpus is not None:
                    trial.allocate(requirements, gpus)
        return trial

    def check(self, leases: dict[str, LeaseState]) -> None:
        """Raise AssertionError unless all that is known here are leases that have not ended."""
        victims: dict[str, list[int]] = {}
        for under_way in self._of.values():
            for number, one in under_way.items():
                assert one.victims, "a preemption without victims is under way"
                for lease_id in one.victims:
                    victims.setdefault(lease_id, []).append(number)
        known = {lease_id: sorted(numbers) for lease_id, numbers in self._with.items()}
        assert known == {i: sorted(numbers) for i, numbers in victims.items()}, "other victims"
        assert known.keys() <= leases.keys(), "a victim has ended"


def _key(place: NodeInfo) -> PlaceKey:
    return place.node_id, place.bundle_lease_id


def _discard(table: dict[Any, dict[int, Preemption]], key: Any, number: int) -> None:
    del table[key][number]
    if not table[key]:
        del table[key]
