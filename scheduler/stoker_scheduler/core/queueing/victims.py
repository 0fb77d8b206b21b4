"""The leases that may be preempted, and which of one place have to end so that requirements fit there.

Of those that may, the cheapest by :func:`victim_cost`, and none that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.requirements import ANY_BUNDLE
from stoker_scheduler.core.placement.feasibility import RULES, Check, Rule, first_obstacle
from stoker_scheduler.core.queueing.fairness import FairShares

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.state import State


def victim_cost(lease: LeaseState) -> tuple[bool, int, int, float]:
    """Return the cost of ending a lease, the least first.

    What can be ended before what can only be asked to; then the lowest priority; then what was preempted
    least often; then what has run for the shortest time, whose end loses the least work.
    """
    return not lease.preemptible, lease.priority, lease.preemptions, -lease.granted_at_s


Place = tuple[NodeInfo, list[LeaseState]]
"""A node, or a bundle, and the leases there that may be preempted, the cheapest first."""


class BusyLeases:
    """The leases in use that may be preempted, the cheapest first; looked for once in a cycle.

    Of all that there are, or of ``among``.
    """

    __slots__ = ("_among", "_asked", "_fair", "_leases", "_state")

    def __init__(self, state: State, among: dict[str, None] | None = None) -> None:
        self._state = state
        self._among: dict[str, Any] = state.leases if among is None else among
        self._leases: list[LeaseState] | None = None
        self._asked: list[LeaseState] | None = None
        self._fair: FairShares | None = None

    @property
    def leases(self) -> list[LeaseState]:
        """The leases; some may have been preempted since."""
        if self._leases is None:
            leases = self._state.leases
            newest = (leases[lease_id] for lease_id in reversed(self._among))
            self._leases = [lease for lease in newest if _may_yield(lease)]
            if self._state.preemptible:
                self._leases.sort(key=victim_cost)
        return self._leases

    @property
    def asked(self) -> list[LeaseState]:
        """The leases that may be stopped and were only asked for, the cheapest first."""
        if self._asked is None:
            leases = self._state.leases
            asked = [
                lease
                for lease in map(leases.__getitem__, self._state.preemptible)
                if lease.preempted
                and lease.phase is Phase.HELD
                and lease.kind is not Kind.BUNDLE
                and not lease.stop_reason
            ]
            self._asked = sorted(asked, key=victim_cost)
        return self._asked

    def places(
        self, requirements: Requirements, is_candidate: Callable[[LeaseState], bool]
    ) -> Iterator[Place]:
        """Yield the places with candidates, as :func:`by_place` does, looking at no more than is read."""
        seen: set[tuple[str, str]] = set()
        for lease in self.leases:
            if not is_candidate(lease) or not _is_of_use(lease, requirements):
                continue
            place = lease.place
            key = (place.node_id, place.bundle_lease_id)
            if key not in seen:
                seen.add(key)
                yield place, [one for one in self.at(place) if is_candidate(one)]

    def at(self, place: NodeInfo) -> list[LeaseState]:
        """Return those that have their resources of one node, or bundle."""
        leases = self._state.leases
        there = [leases[lease_id] for lease_id in reversed(place.leases) if lease_id in self._among]
        there = [lease for lease in there if _may_yield(lease)]
        return sorted(there, key=victim_cost) if self._state.preemptible else there

    def has_lower(self, highest: Mapping[str, int]) -> bool:
        """Return whether in some queue a lease has a lower priority than ``highest`` says."""
        known = self._state.priorities
        return any(
            lower < priority
            for queue, priority in highest.items()
            for lower in known.get(queue, ())
        )

    @property
    def fair(self) -> FairShares:
        """The shares as of what was preempted so far."""
        if self._fair is None:
            self._fair = FairShares(self._state)
        return self._fair


def _may_yield(lease: LeaseState) -> bool:
    if lease.requirements.background:  # also as it starts, or waits in ``get``
        return not lease.preempted and lease.phase is not Phase.RELEASING
    return (
        (lease.kind is Kind.TASK or lease.preemptible)
        and lease.phase is Phase.HELD
        and not lease.preempted
        and not lease.blocked
    )


def by_place(candidates: Iterable[LeaseState], requirements: Requirements) -> Iterator[Place]:
    """Group leases by node, or by bundle for requirements that go into one; the others are of no use."""
    places: dict[tuple[str, str], Place] = {}
    for lease in candidates:
        if _is_of_use(lease, requirements):
            place = lease.place
            key = (place.node_id, place.bundle_lease_id)
            places.setdefault(key, (place, []))[1].append(lease)
    return iter(places.values())


def _is_of_use(lease: LeaseState, requirements: Requirements) -> bool:
    """Return whether the end of a lease frees something where the requirements go."""
    group_id = lease.group_id if lease.in_bundle else ""
    if lease.preempted or group_id != requirements.group_id:
        return False
    return not group_id or requirements.bundle in (ANY_BUNDLE, lease.bundle)


@dataclass(slots=True)
class Proposal:
    """Leases whose end makes room at ``place``, and the place as it is then, with the room taken."""

    place: NodeInfo
    trial: NodeInfo
    victims: list[LeaseState]
    """All that end: those that were chosen, with the gangs that they are of."""
    chosen: list[LeaseState]
    candidates: list[LeaseState]
    """Those among which the victims were chosen."""
    seen: int
    """How many preemptions there were at the place."""

    @property
    def cost(self) -> tuple[bool, int, int, int, float]:
        """Its cost: first that of the dearest kind of victim, then how many there are and what they lose."""
        victims = self.victims
        return (
            any(not lease.preemptible for lease in victims),
            max(lease.priority for lease in victims),
            len(victims),
            sum(lease.preemptions for lease in victims),
            -sum(lease.granted_at_s for lease in victims),
        )


def choose_victims(
    trial: NodeInfo,
    requirements: Requirements,
    candidates: Sequence[LeaseState],
    allowed: Callable[[LeaseState], bool],
    rules: tuple[Check, ...] = RULES,
    ends_with: Callable[[LeaseState], Sequence[LeaseState]] = lambda lease: (),
) -> list[LeaseState] | None:
    """Return the leases whose end lets ``requirements`` fit on ``trial``, and allocate them there.

    ``candidates`` are taken in their order; with each ends what ``ends_with`` says of the place, which is not
    returned. None, and ``trial`` as it was, if they do not suffice; also if no lease need end at all.
    """
    units: list[list[LeaseState]] = []
    while (obstacle := first_obstacle(trial, requirements, rules)) is not None:
        names: Iterable[str] = ()
        if obstacle.rule is Rule.AVAILABLE:
            names = (obstacle.subject,)
        elif obstacle.rule is Rule.FILTER_NOW:
            names = requirements.reads
        taken = [lease for unit in units for lease in unit]
        others = (v for v in candidates if v not in taken)
        holders = (v for v in others if any(v.has_allocated(name) for name in names))
        victim = next((v for v in holders if allowed(v)), None)
        if victim is None:
            for lease in taken:
                _allocate(trial, lease)
            return None
        units.append([victim, *ends_with(victim)])
        for lease in units[-1]:
            _free(trial, lease)
    if not units:
        return None
    _spare(trial, requirements, units, rules)
    trial.allocate(requirements, trial.choose(requirements) or {})
    return [unit[0] for unit in units]


def _spare(
    trial: NodeInfo,
    requirements: Requirements,
    units: list[list[LeaseState]],
    rules: tuple[Check, ...],
) -> None:
    """Take those out of ``units`` without whose end ``requirements`` fit as well, the dearest first."""
    dearest = sorted(units, key=lambda unit: victim_cost(unit[0]), reverse=True)
    for unit in dearest if len(units) > 1 else ():
        for lease in unit:
            _allocate(trial, lease)
        if first_obstacle(trial, requirements, rules) is None:
            units.remove(unit)
        else:
            for lease in unit:
                _free(trial, lease)


def _allocate(trial: NodeInfo, lease: LeaseState) -> None:
    trial.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)


def _free(trial: NodeInfo, lease: LeaseState) -> None:
    trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
