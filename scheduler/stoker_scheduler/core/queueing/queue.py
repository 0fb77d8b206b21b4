"""The queue of pending requests, ordered by priority, then fair share, then time of arrival.

The priority grows with the time waited; of accounts, the one with the smallest dominant share goes
first; :class:`~stoker_scheduler.core.queueing.tenants.Tenants` says which of several tenants' queues is
next. Requests wait in subqueues, one per requirements: if the head of a subqueue fits nowhere, the rest
of it cannot fit either and is skipped, while other subqueues go on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind, LeaseAdopted, LeaseRequested
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.queueing.blocked import BlockedSubqueues

if TYPE_CHECKING:
    from stoker_scheduler.core.queueing.tenants import Hold

GCS_OWNER = "gcs"
SENIORITY_TTL_S = 10.0
"""A request sent within this time after its owner's last one ended its wait keeps that one's seniority."""


def account_of(request: LeaseRequested | LeaseAdopted) -> Account:
    """Return the account that fairness charges for a lease."""
    return Account(request.owner_id, request.job_id, request.user, request.queue)


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet.

    ``wanted`` leases have no node yet (the request is in a subqueue while there are some),
    ``starting`` ones have a node, ``ready`` ones have a worker and are granted with the reply. A gang is
    wanted once, and granted when all of its bundles are ready and none is ``committing``.
    """

    request: LeaseRequested
    account: Account
    belongs_to: tuple[str, ...]
    """Owner, job and placement group, whose end is its end."""
    seq: int
    since_s: float
    deadline_s: float
    wanted: int = 0
    starting: dict[str, None] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    committing: dict[str, None] = field(default_factory=dict)
    is_committed: bool = False
    """Whether the nodelets were told that the gang is whole."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def requirements(self) -> Requirements | Gang:
        """The requirements of each lease, or of all bundles of a gang."""
        return self.request.requirements

    @property
    def rank(self) -> tuple[int, float, int]:
        """The sort key in the queue, the least first; it stays the same while the request waits."""
        return (-self.request.priority, self.since_s, self.seq)

    def effective_priority(self, at_s: float, aging_s: float) -> int:
        """Return the priority, one higher for each ``aging_s`` waited, so that nothing starves."""
        return self.request.priority + int((at_s - self.since_s) / aging_s)


class WaitingRequests:
    """The requests of one account with equal requirements: those of one priority in order of arrival."""

    __slots__ = ("_by_priority", "wanted")

    def __init__(self) -> None:
        # The first of a dict is found behind all that were removed before it; of an OrderedDict, at once.
        self._by_priority: dict[int, OrderedDict[str, PendingRequest]] = {}
        self.wanted = 0
        """The number of leases that they wait for."""

    def __bool__(self) -> bool:
        return bool(self._by_priority)

    def __iter__(self) -> Iterator[PendingRequest]:
        for waiting in self._by_priority.values():
            yield from waiting.values()

    def __contains__(self, pending: PendingRequest) -> bool:
        return pending.request_id in self._by_priority.get(pending.request.priority, ())

    def add(self, pending: PendingRequest) -> None:
        """Add a request that is not among them."""
        waiting = self._by_priority.get(pending.request.priority)
        if waiting is None:
            waiting = self._by_priority[pending.request.priority] = OrderedDict()
        is_last = not waiting or waiting[next(reversed(waiting))].rank < pending.rank
        waiting[pending.request_id] = pending
        self.wanted += pending.wanted
        if not is_last:
            ordered = sorted(waiting.values(), key=lambda one: one.rank)
            self._by_priority[pending.request.priority] = OrderedDict(
                (one.request_id, one) for one in ordered
            )

    def remove(self, pending: PendingRequest) -> None:
        """Remove a request that is among them."""
        waiting = self._by_priority[pending.request.priority]
        del waiting[pending.request_id]
        self.wanted -= pending.wanted
        if not waiting:
            del self._by_priority[pending.request.priority]

    @property
    def firsts(self) -> list[PendingRequest]:
        """The first request of each priority."""
        return [next(iter(waiting.values())) for waiting in self._by_priority.values()]

    def first(self, priority: int) -> PendingRequest | None:
        """Return the first request of one priority, or None."""
        waiting = self._by_priority.get(priority)
        return next(iter(waiting.values())) if waiting else None


@dataclass(slots=True)
class Subqueue:
    """All waiting requests with equal requirements, by account."""

    requirements: Requirements | Gang
    accounts: dict[Account, WaitingRequests] = field(default_factory=dict)
    startable: int | None = None
    """How many leases the limits of its accounts' queues allow, where that was asked."""
    impatient: int = 0
    """How many of the requests are rejected if no node could ever take them."""
    _oldest: dict[int, PendingRequest | None] = field(default_factory=dict)
    """Priority -> the request that has waited longest; None until it is looked for again."""

    def add(self, pending: PendingRequest) -> None:
        """Add a request that is not there."""
        waiting = self.accounts.get(pending.account)
        if waiting is None:
            waiting = self.accounts[pending.account] = WaitingRequests()
        waiting.add(pending)
        self.impatient += not pending.request.wait_if_infeasible
        priority = pending.request.priority
        oldest = self._oldest.get(priority, pending)
        if oldest is not None and pending.rank <= oldest.rank:
            self._oldest[priority] = pending

    def remove(self, pending: PendingRequest) -> None:
        """Remove a request that is there."""
        waiting = self.accounts[pending.account]
        waiting.remove(pending)
        self.impatient -= not pending.request.wait_if_infeasible
        if not waiting:
            del self.accounts[pending.account]
        if self._oldest[pending.request.priority] is pending:
            self._oldest[pending.request.priority] = None

    def head(self, at_s: float, aging_s: float) -> PendingRequest:
        """Return the request that has waited longest among those of the highest priority, with age."""
        for priority in [p for p, oldest in self._oldest.items() if oldest is None]:
            firsts = (waiting.first(priority) for waiting in self.accounts.values())
            oldest = min((one for one in firsts if one is not None), key=_rank, default=None)
            if oldest is None:
                del self._oldest[priority]
            else:
                self._oldest[priority] = oldest
        known = [one for one in self._oldest.values() if one is not None]
        return min(
            known or self.firsts(),
            key=lambda p: (-p.effective_priority(at_s, aging_s), p.since_s, p.seq),
        )

    def pending(self) -> Iterator[PendingRequest]:
        """Iterate over the waiting requests, account by account."""
        for waiting in self.accounts.values():
            yield from waiting

    def firsts(self) -> Iterator[PendingRequest]:
        """Iterate over the first request of each account and priority."""
        for waiting in self.accounts.values():
            yield from waiting.firsts

    @property
    def wanted(self) -> int:
        """The number of leases that the subqueue waits for, and that may start."""
        wanted = sum(waiting.wanted for waiting in self.accounts.values())
        return wanted if self.startable is None else min(wanted, self.startable)


_rank = attrgetter("rank")


class RequestQueue:
    """The subqueues, and the seniority of requests whose wait has passed, for their repetition."""

    __slots__ = (
        "_background_ranks",
        "_ranks",
        "_seniority",
        "accounts",
        "blocked",
        "held",
        "joined",
        "open",
        "subqueues",
    )

    def __init__(self) -> None:
        self.subqueues: dict[Requirements | Gang, Subqueue] = {}
        self.open: dict[Requirements | Gang, None] = {}
        """Those that the next cycle looks at: new ones, and blocked ones that may fit now."""
        self.blocked = BlockedSubqueues()
        """Those that fit nowhere now."""
        self.joined: dict[Requirements | Gang, None] = {}
        """Blocked ones that got another request: nothing fits still, but there is more to make room for."""
        self.held: dict[Requirements | Gang, dict[Account, Hold]] = {}
        """Those of which some accounts may not start more now."""
        self.accounts: dict[Account, int] = {}
        """The accounts that wait for more than what others leave, with the number of such requests."""
        self._ranks: list[tuple[int, float, int]] = []
        self._background_ranks: list[tuple[int, float, int]] = []
        self._seniority: dict[tuple[Account, str], tuple[float, float]] = {}

    def want(self, pending: PendingRequest, leases: int) -> None:
        """Have a request want so many leases; it is in the queue while it wants some."""
        if pending.wanted and leases:
            waiting = self.subqueues[pending.requirements].accounts[pending.account]
            waiting.wanted += leases - pending.wanted
            pending.wanted = leases
            return
        if pending.wanted:
            self._remove(pending)
        pending.wanted = leases
        if leases:
            self._add(pending)

    def _waiting(self, pending: PendingRequest) -> WaitingRequests | None:
        """Return the requests among which a request waits, or None if it does not."""
        subqueue = self.subqueues.get(pending.requirements)
        waiting = None if subqueue is None else subqueue.accounts.get(pending.account)
        return waiting if waiting is not None and pending in waiting else None

    def _add(self, pending: PendingRequest) -> None:
        requirements = pending.requirements
        subqueue = self.subqueues.get(requirements)
        if subqueue is None:
            subqueue = self.subqueues[requirements] = Subqueue(requirements)
        subqueue.add(pending)
        if not requirements.background:
            self.accounts[pending.account] = self.accounts.get(pending.account, 0) + 1
        insort(self._ranks_of(pending), pending.rank)
        if requirements in self.blocked:
            self.joined[requirements] = None
        else:
            self.open[requirements] = None

    def _remove(self, pending: PendingRequest) -> None:
        """Remove a request; an empty subqueue goes with it."""
        requirements, account = pending.requirements, pending.account
        subqueue = self.subqueues[requirements]
        subqueue.remove(pending)
        if not requirements.background:
            self.accounts[account] -= 1
            if not self.accounts[account]:
                del self.accounts[account]
        ranks = self._ranks_of(pending)
        del ranks[bisect_left(ranks, pending.rank)]
        if not subqueue.accounts:
            del self.subqueues[requirements]
            self.open.pop(requirements, None)
            self.joined.pop(requirements, None)
            self.blocked.discard(requirements)
            self.held.pop(requirements, None)

    def take_open(self) -> list[Subqueue]:
        """Return the subqueues to look at; what is not assigned of them must be set aside again.

        By :meth:`block` if nothing fits, by :meth:`hold` for an account that may not start more.
        """
        taken = [self.subqueues[requirements] for requirements in self.open]
        for requirements in self.open:
            self.blocked.discard(requirements)
            self.held.pop(requirements, None)
        self.open = {}
        return taken

    def take_joined(self) -> list[Subqueue]:
        """Return the blocked subqueues that got another request since, and of which nothing fits still."""
        joined, self.joined = self.joined, {}
        return [self.subqueues[one] for one in joined if one in self.blocked]

    def block(self, subqueue: Subqueue) -> None:
        """Set a subqueue aside until something changes that could help it."""
        self.blocked.add(subqueue.requirements)

    def hold(self, pending: PendingRequest, hold: Hold) -> None:
        """Set the requests of one account in a subqueue aside until the limit allows more."""
        self.held.setdefault(pending.requirements, {})[pending.account] = hold

    def wake(self, woken: Iterable[Requirements | Gang]) -> None:
        """Have the next cycle look at subqueues that were set aside."""
        self.open.update(dict.fromkeys(woken))

    def __contains__(self, pending: PendingRequest) -> bool:
        """Return whether the request waits in its subqueue."""
        return self._waiting(pending) is not None

    def pending(self) -> Iterator[PendingRequest]:
        """Iterate over all waiting requests, subqueue by subqueue."""
        for subqueue in self.subqueues.values():
            yield from subqueue.pending()

    def position(self, pending: PendingRequest) -> int:
        """Return how many waiting requests are ahead by priority, then by time; background ones come last."""
        ahead = bisect_left(self._ranks_of(pending), pending.rank)
        return ahead + len(self._ranks) if pending.requirements.background else ahead

    def _ranks_of(self, pending: PendingRequest) -> list[tuple[int, float, int]]:
        return self._background_ranks if pending.requirements.background else self._ranks

    def keep_seniority(self, pending: PendingRequest, at_s: float) -> None:
        """Keep since when a request has waited, for the next one of its account and class."""
        seniority, key = self._seniority, (pending.account, pending.request.class_key)
        seniority.pop(key, None)
        seniority[key] = (pending.since_s, at_s)
        for oldest in list(islice(seniority, 2)):
            if at_s - seniority[oldest][1] > SENIORITY_TTL_S:
                del seniority[oldest]

    def since(self, account: Account, class_key: str, at_s: float) -> float:
        """Return since when a new request counts as waiting: now, or as kept by its predecessor."""
        if not self._seniority:
            return at_s
        since_s, kept_at_s = self._seniority.pop((account, class_key), (at_s, at_s))
        return since_s if at_s - kept_at_s <= SENIORITY_TTL_S else at_s


def outlives_job(kind: Kind, owner_id: str) -> bool:
    """Return whether a lease or request outlives its job: what the gcs ends itself (actors, bundles)."""
    return kind in (Kind.ACTOR, Kind.BUNDLE) and owner_id == GCS_OWNER
