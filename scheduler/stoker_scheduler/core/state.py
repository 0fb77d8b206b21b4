"""The scheduler's whole state, and the invariants that hold after every event.

Owned by one engine; changed only by ``machine`` and the modules it calls. Iteration is over dicts in
insertion order, never over sets, so that equal events give equal states whatever the hash seed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.starting import StartingLeases
from stoker_scheduler.core.model.nodes import Health, NodeInfo
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import UNIT, Units, add
from stoker_scheduler.core.placement.ranking import DirtyNodes, Ranking
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.queueing.queue import PendingRequest, RequestQueue, dominant_share

if TYPE_CHECKING:
    from stoker_scheduler.core.model.devices import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """The numbers that shape decisions; all times in seconds."""

    score: ScorePolicy = field(default_factory=ScorePolicy)
    lease_ttl_s: float = 10.0
    infeasible_grace_s: float = 10.0
    no_nodes_grace_s: float = 30.0
    """Zero nodes prove nothing about what could fit, so they get more time to come."""
    aging_s: float = 30.0
    reserve_after_s: float = 5.0
    reserve_for_s: float = 60.0
    max_reserved: int = 4
    linger_s: float = 0.05
    """How long a reply with some leases waits for others that are starting."""
    start_grace_s: float = 2.0
    """How long a request whose wait has passed still waits for a worker that is starting."""
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    preemption_pause_s: float = 0.25
    quantum_s: float = 0.1
    """The least time for which a busy lease is safe from preemption for fairness: with more accounts
    than leases to be had, a lease changes hands this often and not more."""
    remember_answers_s: float = 60.0


class Timer(Enum):
    """The kinds of timers; the comment names the timer's subject, and why it is looked at."""

    DEADLINE = "deadline"  # a request: its wait has passed
    LINGER = "linger"  # a request: it has some of its leases and waited a little for more
    EXPIRY = "expiry"  # a lease: its owner did not renew it
    ORPHAN = "orphan"  # a lease: its request was not repeated
    BACKOFF = "backoff"  # a node: leases may start there again
    CYCLE = "cycle"  # nothing: only the scheduling cycle is to run


@dataclass(slots=True)
class Answer:
    """The leases that a request was granted, for when it is sent again."""

    at_s: float
    lease_ids: tuple[str, ...]


@dataclass(slots=True)
class Reservation:
    """A node reserved for one requirement; ``unwanted_since_s`` is when its last request left the queue."""

    node_id: str
    until_s: float
    unwanted_since_s: float | None = None


MAX_RANKINGS = 256


@dataclass(slots=True)
class State:
    """Nodes, leases, requests and timers. ``term`` is part of the ids of the leases that it makes."""

    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    term: str = "0"
    nodes: dict[str, NodeInfo] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    queue: RequestQueue = field(default_factory=RequestQueue)
    answers: dict[str, Answer] = field(default_factory=dict)
    usage: dict[str, Units] = field(default_factory=dict)
    """Account -> the resources that its leases have allocated."""
    idle: dict[str, None] = field(default_factory=dict)
    """Leases that their owners do not use and that are not preempted."""
    orphaned: dict[str, None] = field(default_factory=dict)
    """Leases that started, or are starting, for a request that has ended."""
    starting: StartingLeases = field(default_factory=StartingLeases)
    finished_jobs: dict[str, float] = field(default_factory=dict)
    infeasible_since_s: dict[Requirements, float] = field(default_factory=dict)
    feasible: dict[Requirements, bool] = field(default_factory=dict)
    """Requirements -> whether an idle node could take them; cleared when the nodes change."""
    reserved: dict[Requirements, Reservation] = field(default_factory=dict)
    preemptions: dict[Requirements, list[dict[str, None]]] = field(default_factory=dict)
    """Preemptions under way: each dict of victims makes room for one more lease of the requirements."""
    preemption_due_s: float = 0.0
    """When to look again for busy leases to preempt and for nodes to reserve."""
    preemption_checked: dict[Requirements, None] = field(default_factory=dict)
    """Requirements that were looked at since."""
    reserve_due_s: dict[Requirements, float] = field(default_factory=dict)
    unsettled: dict[str, None] = field(default_factory=dict)
    """Requests that may be granted at the end of this step."""
    timers: list[tuple[float, int, Timer, str]] = field(default_factory=list)
    at_s: float = 0.0
    capacity: Units = field(default_factory=dict)
    """Sum of the totals of ALIVE nodes."""
    wake_at_s: float = float("inf")
    placed: int = 0
    _counter: int = 0
    _dirty: DirtyNodes = field(default_factory=DirtyNodes)
    _rankings: dict[tuple[Requirements, str], Ranking] = field(default_factory=dict)

    def next_number(self) -> int:
        """Return the next of a sequence, for ids and ties."""
        self._counter += 1
        return self._counter

    def mark_dirty(self, node_id: str) -> None:
        """Have every ranking look at the node again: what it can take has changed."""
        self._dirty.add(node_id, len(self.nodes))

    def set_timer(self, at_s: float, timer: Timer, subject: str = "") -> None:
        """Have ``timer`` run for ``subject`` at ``at_s``."""
        heapq.heappush(self.timers, (at_s, self.next_number(), timer, subject))

    def best_node(
        self, requirements: Requirements, pending: PendingRequest | None = None
    ) -> str | None:
        """Return the node to which ``requirements`` would be assigned now, or None."""
        kernels = pending.request.kernels if pending is not None else ""
        ranking = self._rankings.get((requirements, kernels))
        if ranking is None:
            if len(self._rankings) >= MAX_RANKINGS:
                del self._rankings[next(iter(self._rankings))]
            ranking = self._rankings[requirements, kernels] = Ranking(requirements, kernels)
        locality = pending.request.locality if pending is not None else None
        return ranking.best(self.nodes, self._dirty, self.policy.score, locality)

    def share(self, account: str) -> float:
        """Return the account's dominant share of the cluster, 0 to 1 (more if overcommitted)."""
        used = self.usage.get(account)
        return dominant_share(used, self.capacity) if used else 0.0

    def charge(self, account: str, resources: tuple[tuple[str, int], ...], sign: int) -> None:
        """Add resources to an account's usage, or with ``sign`` -1 subtract them."""
        used = self.usage.setdefault(account, {})
        add(used, resources, sign)
        if not used:
            del self.usage[account]

    def nodes_changed(self) -> None:
        """Recount the capacity after a node came, went or changed."""
        self.feasible.clear()
        capacity: Units = {}
        for node in self.nodes.values():
            if node.spec.health is Health.ALIVE:
                add(capacity, node.spec.total_units.items())
        self.capacity = capacity

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Called by tests after every event."""
        by_node: dict[str, list[LeaseState]] = {node_id: [] for node_id in self.nodes}
        usage: dict[str, Units] = {}
        for lease in self.leases.values():
            assert lease.node_id in by_node, (
                f"{lease.lease_id} is on the unknown node {lease.node_id}"
            )
            by_node[lease.node_id].append(lease)
            add(usage.setdefault(lease.account, {}), lease.allocated)
            self._check_lease(lease)
        for node_id, node in self.nodes.items():
            _check_node(node, by_node[node_id])
        used = {account: units for account, units in usage.items() if units}
        assert self.usage == used, "usage is not what leases have allocated"
        starting = {i for i, lease in self.leases.items() if lease.phase is Phase.STARTING}
        assert set(self.starting.lease_ids()) == starting, "the index of starting leases is wrong"
        self._check_pending()
        for requirements, reservation in self.reserved.items():
            assert self.nodes[reservation.node_id].reserved_for == requirements, (
                "a reservation is one-sided"
            )
        for lease_id in self.idle:
            lease = self.leases[lease_id]
            assert lease.phase is Phase.HELD and lease.idle and not lease.preempted

    def _check_lease(self, lease: LeaseState) -> None:
        lease_id, pending = lease.lease_id, self.pending.get(lease.request_id)
        assert lease.incarnation == self.nodes[lease.node_id].spec.incarnation, lease_id
        memberships = [
            pending is not None and (lease_id in pending.starting or lease_id in pending.ready),
            lease_id in self.orphaned,
            lease.phase in (Phase.HELD, Phase.RELEASING),
        ]
        count = sum(memberships)
        assert count == 1, f"{lease_id} ({lease.phase}) is in {count} collections instead of one"
        if lease.phase is Phase.HELD and lease.owner_id != "gcs":
            assert lease.expires_at_s is not None, f"{lease_id} never expires"

    def _check_pending(self) -> None:
        for request_id, pending in self.pending.items():
            assert pending.wanted >= 0, request_id
            assert (pending in self.queue) == (pending.wanted > 0), (
                f"{request_id} waits and wants nothing"
            )
            for lease_id in (*pending.starting, *pending.ready):
                phase = self.leases[lease_id].phase
                assert phase is (Phase.STARTING if lease_id in pending.starting else Phase.READY)
        for pending in self.queue.pending():
            assert self.pending.get(pending.request_id) is pending, (
                f"{pending.request_id} waits but has ended"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain values, to compare two of them."""
        return {
            "at_s": self.at_s,
            "nodes": {
                n: (node.spec, node.available, node.devices.free_by_device, list(node.leases))
                for n, node in self.nodes.items()
            },
            "leases": [repr(lease) for lease in self.leases.values()],
            "pending": [repr(pending) for pending in self.pending.values()],
            "usage": self.usage,
            "answers": list(self.answers.items()),
            "orphaned": list(self.orphaned),
            "reserved": [(n.text, repr(reservation)) for n, reservation in self.reserved.items()],
            "counter": self._counter,
        }


def _check_node(node: NodeInfo, leases: list[LeaseState]) -> None:
    assert sorted(node.leases) == sorted(lease.lease_id for lease in leases), node.node_id
    used: Units = {}
    shares: Shares = {}
    for lease in leases:
        add(used, lease.requirements.without_cpu if lease.blocked else lease.requirements.items)
        assert sum(lease.gpus.values()) == lease.requirements.gpu, f"{lease.lease_id} lacks GPUs"
        for index, units in lease.gpus.items():
            shares[index] = shares.get(index, 0) + units
    for index, units in shares.items():
        assert units <= UNIT, f"GPU {index} of {node.node_id} is over-allocated: {units} units"
    for index, free in node.devices.free_by_device.items():
        assert free == UNIT - shares.get(index, 0), f"GPU {index} of {node.node_id} leaks"
    for name in {**node.spec.total, **used, **node.available}:
        left = node.spec.total.get(name, 0) - used.get(name, 0)
        assert node.available.get(name, 0) == left, f"{name} of {node.node_id} leaks"
        assert name == "CPU" or left >= 0 or node.spec.total.get(name, 0) == 0, (
            f"{name} of {node.node_id} is over-allocated"
        )
