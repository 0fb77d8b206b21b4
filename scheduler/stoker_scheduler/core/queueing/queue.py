"""Who is next: priority (which grows with waiting), then the least served account, then first come.

Requests wait in lanes, one per kind of need: if the head of a lane fits nowhere, the rest of the
lane cannot fit either and is skipped, while other lanes go on. An account is an owner (for the gcs,
which asks on behalf of everybody, a job).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from stoker_scheduler.core.events import Kind, LeaseAsked
from stoker_scheduler.core.model.requirements import Need

GCS_OWNER = "gcs"
REJOIN_S = 10.0
"""Who asks again within this time after its wait has passed keeps its place in the queue."""


def account_of(owner_id: str, job_id: str) -> str:
    """Return whom fairness counts a lease for."""
    return f"{GCS_OWNER}:{job_id}" if owner_id == GCS_OWNER else owner_id


@dataclass(slots=True)
class Ask:
    """A request that is not answered yet.

    ``wanted`` leases have no place yet (the ask is in a lane while there are some), ``starting``
    ones have a node, ``ready`` ones have a worker and go out with the reply.
    """

    asked: LeaseAsked
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
        return self.asked.request_id

    @property
    def need(self) -> Need:
        """What each lease needs."""
        return self.asked.need

    @property
    def rank(self) -> tuple[int, float, int]:
        """The ask's place in the queue, the least first; it stays the same while the ask waits."""
        return (-self.asked.priority, self.since_s, self.seq)

    def effective_priority(self, at_s: float, aging_s: float) -> int:
        """Return the priority, one higher for each ``aging_s`` waited, so that nothing starves."""
        return self.asked.priority + int((at_s - self.since_s) / aging_s)


@dataclass(slots=True)
class Lane:
    """All waiting asks with one need."""

    need: Need
    accounts: dict[str, dict[str, Ask]] = field(default_factory=dict)

    def asks(self) -> Iterator[Ask]:
        """Iterate over the waiting asks, account by account."""
        for waiting in self.accounts.values():
            yield from waiting.values()

    def head(self, at_s: float, aging_s: float) -> Ask:
        """Return the ask that has waited longest among those of the highest priority."""
        return min(
            self.asks(), key=lambda a: (-a.effective_priority(at_s, aging_s), a.since_s, a.seq)
        )

    @property
    def wanted(self) -> int:
        """How many leases the lane waits for."""
        return sum(ask.wanted for ask in self.asks())


class Queue:
    """The lanes, and the seniority of those who asked and are about to ask again."""

    __slots__ = ("_ranks", "_seniority", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[Need, Lane] = {}
        self._ranks: list[tuple[int, float, int]] = []
        self._seniority: dict[tuple[str, str], tuple[float, float]] = {}

    def put(self, ask: Ask) -> None:
        """Let ``ask`` wait; it must want something."""
        lane = self.lanes.get(ask.need)
        if lane is None:
            lane = self.lanes[ask.need] = Lane(ask.need)
        waiting = lane.accounts.setdefault(ask.account, {})
        if ask.request_id not in waiting:
            waiting[ask.request_id] = ask
            insort(self._ranks, ask.rank)

    def drop(self, ask: Ask) -> None:
        """Take ``ask`` out; an empty lane goes. Dropping what does not wait changes nothing."""
        lane = self.lanes.get(ask.need)
        if lane is None or ask.request_id not in lane.accounts.get(ask.account, {}):
            return
        waiting = lane.accounts[ask.account]
        del waiting[ask.request_id]
        del self._ranks[bisect_left(self._ranks, ask.rank)]
        if not waiting:
            del lane.accounts[ask.account]
        if not lane.accounts:
            del self.lanes[ask.need]

    def holds(self, ask: Ask) -> bool:
        """Whether ``ask`` waits in its lane."""
        lane = self.lanes.get(ask.need)
        return lane is not None and ask.request_id in lane.accounts.get(ask.account, {})

    def asks(self) -> Iterator[Ask]:
        """Iterate over all waiting asks, lane by lane."""
        for lane in self.lanes.values():
            yield from lane.asks()

    def position(self, ask: Ask) -> int:
        """Return how many waiting asks are ahead by priority, then by time."""
        return bisect_left(self._ranks, ask.rank)

    def remember(self, ask: Ask, at_s: float) -> None:
        """Keep the place of an ask whose wait has passed for its owner's next one."""
        seniority, place = self._seniority, (ask.account, ask.asked.class_key)
        seniority.pop(place, None)
        seniority[place] = (ask.since_s, at_s)
        for oldest in list(islice(seniority, 2)):
            if at_s - seniority[oldest][1] > REJOIN_S:
                del seniority[oldest]

    def since(self, account: str, class_key: str, at_s: float) -> float:
        """Return since when an ask counts as waiting: now, or since its owner first asked."""
        since_s, left_s = self._seniority.pop((account, class_key), (at_s, at_s))
        return since_s if at_s - left_s <= REJOIN_S else at_s


def keep_after_job(kind: Kind, owner_id: str) -> bool:
    """Whether a lease or ask outlives its job: actors of the gcs, which ends them itself."""
    return kind is Kind.ACTOR and owner_id == GCS_OWNER


def dominant_share(held: Mapping[str, int], total: Mapping[str, int]) -> float:
    """Return the largest part of any one resource of the cluster that ``held`` is."""
    share = 0.0
    for name, units in held.items():
        has = total.get(name, 0)
        if has > 0:
            part = units / has
            if part > share:
                share = part
    return share
