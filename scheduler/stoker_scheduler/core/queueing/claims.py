"""For what a lease may be stopped: claims of those that wait, each by an order that leads in no circle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.leases.lease import LeaseState
from stoker_scheduler.core.queueing.queue import PendingRequest
from stoker_scheduler.core.queueing.tenants import dominant_share

if TYPE_CHECKING:
    from stoker_scheduler.core.queueing.fairness import FairShares
    from stoker_scheduler.core.queueing.queue import Subqueue
    from stoker_scheduler.core.queueing.victims import BusyLeases
    from stoker_scheduler.core.state import State


@dataclass(frozen=True, slots=True)
class Claim:
    """A request for which a lease may be stopped, and why."""

    pending: PendingRequest
    why: str

    @property
    def text(self) -> str:
        """The purpose of the stop, in words."""
        request = self.pending.request
        return f"{request.name or request.kind.value} of {request.job_id}, {self.why}"


Claims = Callable[[LeaseState], "Claim | None"]
"""Returns for what a lease may be stopped, or None."""
Stopped = tuple[LeaseState, Claim]
"""A lease that is to be stopped, and for what."""


def no_claim(lease: LeaseState) -> Claim | None:
    """Return None: nothing is stopped."""
    return None


def or_background(head: PendingRequest, claims: Claims) -> Claims:
    """Return ``claims``, and that of any other work to the room of background work, whatever their order."""

    def claim(lease: LeaseState) -> Claim | None:
        if lease.requirements.background:
            return Claim(head, "which is no background work")
        return claims(lease)

    return claim


def claims_by_order(
    state: State,
    firsts: list[PendingRequest],
    reserved_nodes: Iterable[str],
    busy: BusyLeases,
) -> Claims:
    """Return the claims of a higher priority, and of a reservation for what has waited longer.

    A reservation takes nothing that its account could claim back as a part of its fair share. Where the same
    requirements wait in a queue above, these have the next turn, and so the room.
    """
    queues = {first.account.queue for first in firsts}

    def is_next(first: PendingRequest) -> bool:
        return queues.isdisjoint(state.tenants.names_above(first.account.queue)[1:])

    firsts = [first for first in firsts if _may_force(state, first) and is_next(first)]

    def claim(lease: LeaseState) -> Claim | None:
        for first in firsts if lease.preemptible else ():
            priority = first.request.priority
            if first.account.queue != lease.account.queue:
                continue
            if priority > lease.effective_priority:
                return Claim(first, f"of priority {priority} (its own is {lease.priority})")
            waited_longer = first.since_s < lease.since_s and priority >= lease.effective_priority
            if not waited_longer or lease.node_id not in reserved_nodes:
                continue
            if first.account == lease.account or _is_for_good(state, first, lease, busy.fair):
                return Claim(first, f"which has waited for {state.at_s - first.since_s:.0f} s")
        return None

    return claim


def _is_for_good(state: State, first: PendingRequest, lease: LeaseState, fair: FairShares) -> bool:
    """Return whether a lease that another account loses to ``first`` is not its to claim back."""
    wanted_share = dominant_share(dict(state.cost(first.requirements)), state.capacity)
    taken = fair.may_take(first.account, lease)
    return taken or fair.may_force(first.account, lease, wanted_share)


def claims_by_share(state: State, subqueue: Subqueue, fair: FairShares) -> Claims:
    """Return the claims of the poorest account to what others have beyond their share."""
    poorest = fair.poorest(subqueue.accounts)
    wanted_share = dominant_share(dict(state.cost(subqueue.requirements)), state.capacity)
    firsts = [one for one in subqueue.firsts() if one.account == poorest and _may_force(state, one)]

    def claim(lease: LeaseState) -> Claim | None:
        same_queue = lease.account.queue == poorest.queue
        for first in firsts if lease.preemptible else ():
            if same_queue and first.request.priority < lease.effective_priority:
                continue
            if fair.may_force(poorest, lease, wanted_share):
                return Claim(first, f"whose queue {poorest.queue} has less than its share")
        return None

    return claim


def _may_force(state: State, pending: PendingRequest) -> bool:
    """Return whether something may be stopped for a request: no room made for its class went elsewhere."""
    force = state.forced.get((pending.account, pending.request.class_key))
    return force is None or state.at_s >= force.until_s
