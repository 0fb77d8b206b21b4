"""Policies: in which order the requests of one queue are served.

A policy is a pure function of what is known of a request: it returns a key, and the least key is next. Each
queue names one. Those that are installed, as entry points of the group ``stoker.policies``, are added to
:data:`POLICIES` by the scheduler's shell. Whatever the order, a request that fits nowhere holds up only
those with equal requirements, and what has waited long gets nodes reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker_scheduler.core.events import LeaseRequested
    from stoker_scheduler.core.model.gangs import Gang
    from stoker_scheduler.core.model.requirements import Requirements

DEFAULT_POLICY = "priority"


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request, as far as a policy knows it."""

    priority: int
    """As its job and task ask for it."""
    aged_priority: int
    """One higher for each ``aging_s`` waited."""
    share: float
    """The dominant share of its account (a program) of the cluster, 0 to 1."""
    since_s: float
    """When it began to wait, seconds of the scheduler's clock."""
    waited_s: float
    leases: int
    """How many it waits for."""
    resources: tuple[tuple[str, int], ...]
    """Those of each lease: names and units of 1/10,000, memory in bytes."""
    user: str
    job_id: str


class Pending(Protocol):
    """A request in the queue, as far as an order depends on it."""

    since_s: float
    wanted: int

    @property
    def request(self) -> LeaseRequested:
        """The request as it came."""

    @property
    def requirements(self) -> Requirements | Gang:
        """The requirements of each lease."""

    def effective_priority(self, at_s: float, aging_s: float) -> int:
        """Return the priority, one higher for each ``aging_s`` waited."""


Key = tuple[float, ...]
Policy = Callable[[WaitingRequest], Key]
Order = Callable[[Pending, float, float, float], Key]
"""A policy as the cycle calls it: request, share of its account, time, ``aging_s``."""


def by_priority(pending: Pending, share: float, at_s: float, aging_s: float) -> Key:
    """Highest priority first, one more for each ``aging_s`` waited; then accounts in turn; then arrival."""
    return -pending.effective_priority(at_s, aging_s), share, pending.since_s


def fifo(pending: Pending, share: float, at_s: float, aging_s: float) -> Key:
    """First come, first served."""
    return (pending.since_s,)


def fair(pending: Pending, share: float, at_s: float, aging_s: float) -> Key:
    """Accounts in turn, whatever their priorities; each with its highest priority first."""
    return share, -pending.effective_priority(at_s, aging_s), pending.since_s


def smallest(pending: Pending, share: float, at_s: float, aging_s: float) -> Key:
    """Least GPUs first, then least CPUs; one rank up for each ``aging_s`` waited."""
    amounts = dict(pending.requirements.vector)
    waited = (at_s - pending.since_s) // aging_s
    return amounts.get("GPU", 0) / 1e4 - waited, amounts.get("CPU", 0) / 1e4, pending.since_s


POLICIES: dict[str, Order] = {
    DEFAULT_POLICY: by_priority,
    "fifo": fifo,
    "fair": fair,
    "smallest": smallest,
}


def add_policy(name: str, policy: Policy) -> None:
    """Add an installed policy."""

    def order(pending: Pending, share: float, at_s: float, aging_s: float) -> Key:
        request = pending.request
        waiting = WaitingRequest(
            priority=request.priority,
            aged_priority=pending.effective_priority(at_s, aging_s),
            share=share,
            since_s=pending.since_s,
            waited_s=at_s - pending.since_s,
            leases=pending.wanted,
            resources=pending.requirements.vector,
            user=request.user,
            job_id=request.job_id,
        )
        return policy(waiting)

    POLICIES[name] = order
