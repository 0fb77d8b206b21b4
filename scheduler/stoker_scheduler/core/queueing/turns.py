"""The order of one cycle: of the queues the one whose turn it is, and of its candidates the best.

What is assigned changes whose turn it is, for the queue itself and for those beside it. A turn only comes
later in a cycle, never earlier, so each is looked at again when it comes to the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stoker_scheduler.core.queueing.policies import Key
    from stoker_scheduler.core.queueing.queue import PendingRequest, WaitingRequests
    from stoker_scheduler.core.queueing.tenants import Tenants, Turn


class Candidate(NamedTuple):
    """A request that may be assigned to; the first two are its order within its queue."""

    key: Key
    """As the policy of its queue has made it."""
    seq: int
    pending: PendingRequest
    waiting: WaitingRequests
    """It and the others of its account in its subqueue."""


class Turns:
    """The candidates of a cycle, by queue."""

    __slots__ = ("_at_s", "_candidates", "_queues", "_taken", "_tenants")

    def __init__(self, tenants: Tenants, at_s: float, candidates: Iterable[Candidate]) -> None:
        self._tenants = tenants
        self._at_s = at_s
        self._candidates: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            self._candidates.setdefault(candidate.pending.account.queue, []).append(candidate)
        for waiting in self._candidates.values():
            heapq.heapify(waiting)
        self._queues: list[tuple[Turn, str]] = []
        if len(self._candidates) > 1:
            self._queues = [(self._turn(name), name) for name in self._candidates]
            heapq.heapify(self._queues)
        self._taken = ""
        """The queue of the last candidate: its turn is not among ``_queues``."""

    def pop(self) -> Candidate | None:
        """Remove and return the candidate whose turn it is, if there is one."""
        if len(self._candidates) == 1:
            (waiting,) = self._candidates.values()
            return heapq.heappop(waiting) if waiting else None
        if self._candidates.get(self._taken):
            heapq.heappush(self._queues, (self._turn(self._taken), self._taken))
        while self._queues:
            turn, name = heapq.heappop(self._queues)
            now = self._turn(name)
            if now > turn and self._queues and self._queues[0] < (now, name):
                heapq.heappush(self._queues, (now, name))
                continue
            self._taken = name
            return heapq.heappop(self._candidates[name])
        return None

    def push(self, candidate: Candidate) -> None:
        """Add what follows the candidate that was popped last."""
        heapq.heappush(self._candidates[candidate.pending.account.queue], candidate)

    def _turn(self, name: str) -> Turn:
        resources = self._candidates[name][0].pending.requirements.vector
        return self._tenants.order(name, resources, self._at_s)
