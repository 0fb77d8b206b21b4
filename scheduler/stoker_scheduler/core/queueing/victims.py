"""The choice of victims: which leases of one place have to end so that requirements fit there.

Of those that may, the cheapest by :func:`victim_cost`, and none that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.leases.lease import LeaseState
from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.placement.feasibility import RULES, Check, Rule, first_obstacle

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements


def victim_cost(lease: LeaseState) -> tuple[bool, int, int, float]:
    """Return the cost of ending a lease, the least first.

    What can be ended before what can only be asked to; then the lowest priority; then what was preempted
    least often; then what has run for the shortest time, whose end loses the least work.
    """
    return not lease.preemptible, lease.priority, lease.preemptions, -lease.granted_at_s


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
) -> list[LeaseState] | None:
    """Return the leases whose end lets ``requirements`` fit on ``trial``, and allocate them there.

    ``candidates`` are taken in their order. None, and ``trial`` as it was, if they do not suffice; also if no
    lease need end at all.
    """
    victims: list[LeaseState] = []
    while (obstacle := first_obstacle(trial, requirements, rules)) is not None:
        names: Iterable[str] = ()
        if obstacle.rule is Rule.AVAILABLE:
            names = (obstacle.subject,)
        elif obstacle.rule is Rule.FILTER_NOW:
            names = requirements.reads
        others = (v for v in candidates if v not in victims)
        holders = (v for v in others if any(v.has_allocated(name) for name in names))
        victim = next((v for v in holders if allowed(v)), None)
        if victim is None:
            for lease in victims:
                trial.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)
            return None
        trial.free(victim.requirements, victim.gpus, blocked=victim.blocked)
        victims.append(victim)
    if not victims:
        return None
    _spare(trial, requirements, victims, rules)
    trial.allocate(requirements, trial.choose(requirements) or {})
    return victims


def _spare(
    trial: NodeInfo,
    requirements: Requirements,
    victims: list[LeaseState],
    rules: tuple[Check, ...],
) -> None:
    """Take those out of ``victims`` without whose end ``requirements`` fit as well, the dearest first."""
    for lease in sorted(victims, key=victim_cost, reverse=True) if len(victims) > 1 else ():
        trial.allocate(lease.requirements, lease.gpus, blocked=lease.blocked)
        if first_obstacle(trial, requirements, rules) is None:
            victims.remove(lease)
        else:
            trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
