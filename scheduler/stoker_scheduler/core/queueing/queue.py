"""The queue of pending requests, ordered by priority, then fair share, then time of arrival.

The priority grows with the time waited; of accounts, the one with the smallest dominant share goes
first. Requests wait in subqueues, one per requirements: if the head of a subqueue fits nowhere, the rest
of it cannot fit either and is skipped, while other subqueues go on. An account is an owner (for the gcs,
which requests on behalf of everybody, a job).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from stoker_scheduler.core.events import Kind, LeaseRequested
from stoker_scheduler.core.model.requirements import Requirements

GCS_OWNER = "gcs"
SENIORITY_TTL_S = 10.0
"""A request sent within this time after its owner's last one ended its wait keeps that one's seniority."""


def account_of(owner_id: str, job_id: str) -> str:
    """Return the account that fairness charges for a lease."""
    return f"{GCS_OWNER}:{job_id}" if owner_id == GCS_OWNER else owner_id


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet.

    ``wanted`` leases have no node yet (the request is in a subqueue while there are some),
    ``starting`` ones have a node, ``ready`` ones have a worker and are granted with the reply.
    """

    request: LeaseRequested
    account: str
    seq: int
    since_s: float
    deadline_s: float
    wanted: int
    starting: dict[str, None] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    infeasible: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def requirements(self) -> Requirements:
        """The requirements of each lease."""
        return self.request.requirements

    @property
    def rank(self) -> tuple[int, float, int]:
        """The sort key in the queue, the least first; it stays the same while the request waits."""
        return (-self.request.priority, self.since_s, self.seq)

    def effective_priority(self, at_s: float, aging_s: float) -> int:
        """Return the priority, one higher for each ``aging_s`` waited, so that nothing starves."""
        return self.request.priority + int((at_s - self.since_s) / aging_s)


@dataclass(slots=True)
class Subqueue:
    """All waiting requests with equal requirements, by account."""

    requirements: Requirements
    accounts: dict[str, dict[str, PendingRequest]] = field(default_factory=dict)

    def pending(self) -> Iterator[PendingRequest]:
        """Iterate over the waiting requests, account by account."""
        for waiting in self.accounts.values():
            yield from waiting.values()

    def head(self, at_s: float, aging_s: float) -> PendingRequest:
        """Return the request that has waited longest among those of the highest priority."""
        return min(
            self.pending(), key=lambda p: (-p.effective_priority(at_s, aging_s), p.since_s, p.seq)
        )

    @property
    def wanted(self) -> int:
        """The number of leases that the subqueue waits for."""
        return sum(pending.wanted for pending in self.pending())


class RequestQueue:
    """The subqueues, and the seniority of requests whose wait has passed, for their repetition."""

    __slots__ = ("_ranks", "_seniority", "subqueues")

    def __init__(self) -> None:
        self.subqueues: dict[Requirements, Subqueue] = {}
        self._ranks: list[tuple[int, float, int]] = []
        self._seniority: dict[tuple[str, str], tuple[float, float]] = {}

    def add(self, pending: PendingRequest) -> None:
        """Enqueue a request that wants some lease, if it is not there."""
        requirements, request_id = pending.requirements, pending.request_id
        subqueue = self.subqueues.get(requirements)
        if subqueue is None:
            subqueue = self.subqueues[requirements] = Subqueue(requirements)
        waiting = subqueue.accounts.setdefault(pending.account, {})
        if request_id not in waiting:
            waiting[request_id] = pending
            insort(self._ranks, pending.rank)

    def discard(self, pending: PendingRequest) -> None:
        """Remove a request, if it is there; an empty subqueue goes with it."""
        requirements, request_id = pending.requirements, pending.request_id
        subqueue = self.subqueues.get(requirements)
        if subqueue is None or request_id not in subqueue.accounts.get(pending.account, {}):
            return
        waiting = subqueue.accounts[pending.account]
        del waiting[request_id]
        del self._ranks[bisect_left(self._ranks, pending.rank)]
        if not waiting:
            del subqueue.accounts[pending.account]
        if not subqueue.accounts:
            del self.subqueues[requirements]

    def __contains__(self, pending: PendingRequest) -> bool:
        """Return whether the request waits in its subqueue."""
        subqueue = self.subqueues.get(pending.requirements)
        return subqueue is not None and pending.request_id in subqueue.accounts.get(
            pending.account, {}
        )

    def pending(self) -> Iterator[PendingRequest]:
        """Iterate over all waiting requests, subqueue by subqueue."""
        for subqueue in self.subqueues.values():
            yield from subqueue.pending()

    def position(self, pending: PendingRequest) -> int:
        """Return how many waiting requests are ahead by priority, then by time."""
        return bisect_left(self._ranks, pending.rank)

    def keep_seniority(self, pending: PendingRequest, at_s: float) -> None:
        """Keep since when a request has waited, for the next one of its account and class."""
        seniority, key = self._seniority, (pending.account, pending.request.class_key)
        seniority.pop(key, None)
        seniority[key] = (pending.since_s, at_s)
        for oldest in list(islice(seniority, 2)):
            if at_s - seniority[oldest][1] > SENIORITY_TTL_S:
                del seniority[oldest]

    def since(self, account: str, class_key: str, at_s: float) -> float:
        """Return since when a new request counts as waiting: now, or as kept by its predecessor."""
        since_s, kept_at_s = self._seniority.pop((account, class_key), (at_s, at_s))
        return since_s if at_s - kept_at_s <= SENIORITY_TTL_S else at_s


def outlives_job(kind: Kind, owner_id: str) -> bool:
    """Return whether a lease or request outlives its job: actors of the gcs, which ends them itself."""
    return kind is Kind.ACTOR and owner_id == GCS_OWNER


def dominant_share(used: Mapping[str, int], total: Mapping[str, int]) -> float:
    """Return the largest fraction of any one resource of the cluster that ``used`` is."""
    share = 0.0
    for name, units in used.items():
        has = total.get(name, 0)
        if has > 0:
            part = units / has
            if part > share:
                share = part
    return share
