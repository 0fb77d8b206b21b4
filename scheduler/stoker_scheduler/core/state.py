"""All that the scheduler knows, and the invariants that hold after every event.

Changed only by ``machine`` and the modules it calls. Iteration is over dicts in insertion order,
never over sets, so that equal events give equal states whatever the hash seed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.starts import Starts
from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.nodes import Health, Node
from stoker_scheduler.core.model.requirements import Need
from stoker_scheduler.core.model.resources import CPU, UNIT, Units, add
from stoker_scheduler.core.placement.ranking import Ranking, Touched
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.queueing.queue import Ask, Queue, dominant_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
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
    shun_s: float = 0.2
    shun_max_s: float = 5.0
    recall_pause_s: float = 0.25
    quantum_s: float = 0.1
    """A busy lease is not recalled for fairness before it has lasted so long: with more claimants
    than places, places change hands this often and not more."""
    remember_answers_s: float = 60.0


class Phase(StrEnum):
    """STARTING -> READY -> HELD -> RELEASING -> gone; any phase may end by the node's loss."""

    STARTING = "STARTING"
    """Resources are taken; the nodelet is asked for a worker."""
    READY = "READY"
    """A worker is there; the owner has not been told."""
    HELD = "HELD"
    """The owner was told."""
    RELEASING = "RELEASING"
    """Over; resources are free when the nodelet confirms."""


NEXT_PHASES: dict[Phase, tuple[Phase, ...]] = {
    Phase.STARTING: (Phase.READY, Phase.RELEASING),
    Phase.READY: (Phase.HELD, Phase.RELEASING),
    Phase.HELD: (Phase.RELEASING,),
    Phase.RELEASING: (),
}


@dataclass(slots=True)
class LeaseState:
    """A lease, from the choice of its node to the confirmation of its end."""

    lease_id: str
    owner_id: str
    account: str
    job_id: str
    kind: Kind
    node_id: str
    incarnation: int
    need: Need
    gpus: Shares
    class_key: str
    priority: int
    granted_at_s: float
    phase: Phase = Phase.STARTING
    request_id: str = ""
    expires_at_s: float | None = None
    blocked: bool = False
    idle: bool = False
    recalled: bool = False
    kill: bool = False
    actor_id: str = ""
    name: str = ""

    def move(self, phase: Phase) -> None:
        """Go to the next phase; a move that the table lacks is a bug."""
        if phase not in NEXT_PHASES[self.phase]:
            raise AssertionError(f"{self.lease_id} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def held(self) -> tuple[tuple[str, int], ...]:
        """What the lease holds now, GPUs included; a blocked one holds no CPU."""
        if not self.blocked:
            return self.need.vector
        return tuple((n, u) for n, u in self.need.vector if n != CPU)

    def holds(self, name: str) -> bool:
        """Whether ``held`` has some of the resource ``name``."""
        return name in self.need.names and not (self.blocked and name == CPU)


@dataclass(slots=True)
class Answer:
    """What a request was told, for those who ask twice."""

    at_s: float
    lease_ids: tuple[str, ...]


@dataclass(slots=True)
class Reservation:
    """A node that is kept for one need; ``left_s`` is when nobody waited for it any more."""

    node_id: str
    until_s: float
    left_s: float | None = None


MAX_RANKINGS = 256


@dataclass(slots=True)
class State:
    """Nodes, leases, asks and timers. ``term`` is part of the ids of the leases it makes."""

    policy: Policy = field(default_factory=Policy)
    term: str = "0"
    nodes: dict[str, Node] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    queue: Queue = field(default_factory=Queue)
    answers: dict[str, Answer] = field(default_factory=dict)
    usage: dict[str, Units] = field(default_factory=dict)
    """Account -> what its leases hold."""
    idle: dict[str, None] = field(default_factory=dict)
    """Leases whose owners do not use them and were not asked to give them back."""
    unclaimed: dict[str, None] = field(default_factory=dict)
    """Leases that started, or are starting, for a request that has ended."""
    starts: Starts = field(default_factory=Starts)
    finished_jobs: dict[str, float] = field(default_factory=dict)
    infeasible_since_s: dict[Need, float] = field(default_factory=dict)
    feasible: dict[Need, bool] = field(default_factory=dict)
    """Whether a need could ever fit on the nodes there are; forgotten when they change."""
    reserved: dict[Need, Reservation] = field(default_factory=dict)
    recalls: dict[Need, list[dict[str, None]]] = field(default_factory=dict)
    """Recalls under way: each dict of leases makes room for one more of the need."""
    room_due_s: float = 0.0
    """When to look again for busy leases to recall and for nodes to keep."""
    room_seen: dict[Need, None] = field(default_factory=dict)
    """Needs that were looked at since."""
    reserve_due_s: dict[Need, float] = field(default_factory=dict)
    unsettled: dict[str, None] = field(default_factory=dict)
    """Requests that may be ready for their reply at the end of this step."""
    timers: list[tuple[float, int, str, str]] = field(default_factory=list)
    at_s: float = 0.0
    capacity: Units = field(default_factory=dict)
    """Sum of the totals of ALIVE nodes."""
    wake_at_s: float = float("inf")
    placed: int = 0
    _counter: int = 0
    _touched: Touched = field(default_factory=Touched)
    _rankings: dict[tuple[Need, str], Ranking] = field(default_factory=dict)

    def next_number(self) -> int:
        """Return the next of a sequence, for ids and ties."""
        self._counter += 1
        return self._counter

    def touch(self, node_id: str) -> None:
        """Note that what a node can take has changed."""
        self._touched.add(node_id, len(self.nodes))

    def set_timer(self, at_s: float, what: str, subject: str = "") -> None:
        """Have the machine look at ``subject`` at ``at_s``."""
        heapq.heappush(self.timers, (at_s, self.next_number(), what, subject))

    def best_node(self, need: Need, ask: Ask | None = None) -> str | None:
        """Return where ``need`` would go now, or None."""
        kernels = ask.asked.kernels if ask is not None else ""
        ranking = self._rankings.get((need, kernels))
        if ranking is None:
            if len(self._rankings) >= MAX_RANKINGS:
                del self._rankings[next(iter(self._rankings))]
            ranking = self._rankings[need, kernels] = Ranking(need, kernels)
        locality = ask.asked.locality if ask is not None else None
        return ranking.best(self.nodes, self._touched, self.policy.score, locality)

    def share(self, account: str) -> float:
        """Return the account's dominant share of the cluster, 0 to 1 (more if overcommitted)."""
        held = self.usage.get(account)
        return dominant_share(held, self.capacity) if held else 0.0

    def charge(self, account: str, what: tuple[tuple[str, int], ...], sign: int) -> None:
        """Count resources for (or against) an account."""
        held = self.usage.setdefault(account, {})
        add(held, what, sign)
        if not held:
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
        held: dict[str, list[LeaseState]] = {node_id: [] for node_id in self.nodes}
        usage: dict[str, Units] = {}
        for lease in self.leases.values():
            assert lease.node_id in held, f"{lease.lease_id} is on the unknown node {lease.node_id}"
            held[lease.node_id].append(lease)
            add(usage.setdefault(lease.account, {}), lease.held)
            self._check_lease(lease)
        for node_id, node in self.nodes.items():
            _check_node(node, held[node_id])
        assert self.usage == {a: u for a, u in usage.items() if u}, "usage is not what leases hold"
        starting = {i for i, lease in self.leases.items() if lease.phase is Phase.STARTING}
        assert set(self.starts.lease_ids()) == starting, "starts are not what starts"
        self._check_asks()
        for need, kept in self.reserved.items():
            assert self.nodes[kept.node_id].reserved_for == need, "a reservation is one-sided"
        for lease_id in self.idle:
            lease = self.leases[lease_id]
            assert lease.phase is Phase.HELD and lease.idle and not lease.recalled

    def _check_lease(self, lease: LeaseState) -> None:
        lease_id, ask = lease.lease_id, self.asks.get(lease.request_id)
        assert lease.incarnation == self.nodes[lease.node_id].spec.incarnation, lease_id
        places = [
            ask is not None and (lease_id in ask.starting or lease_id in ask.ready),
            lease_id in self.unclaimed,
            lease.phase in (Phase.HELD, Phase.RELEASING),
        ]
        assert sum(places) == 1, f"{lease_id} ({lease.phase}) is in {sum(places)} places"
        if lease.phase is Phase.HELD and lease.owner_id != "gcs":
            assert lease.expires_at_s is not None, f"{lease_id} never expires"

    def _check_asks(self) -> None:
        for request_id, ask in self.asks.items():
            assert ask.wanted >= 0, request_id
            assert self.queue.holds(ask) == (ask.wanted > 0), (
                f"{request_id} waits and wants nothing"
            )
            for lease_id in (*ask.starting, *ask.ready):
                phase = self.leases[lease_id].phase
                assert phase is (Phase.STARTING if lease_id in ask.starting else Phase.READY)
        for ask in self.queue.asks():
            assert self.asks.get(ask.request_id) is ask, f"{ask.request_id} waits but is over"

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain values, to compare two of them."""
        return {
            "at_s": self.at_s,
            "nodes": {
                n: (node.spec, node.available, node.devices.free, list(node.leases))
                for n, node in self.nodes.items()
            },
            "leases": [repr(lease) for lease in self.leases.values()],
            "asks": [repr(ask) for ask in self.asks.values()],
            "usage": self.usage,
            "answers": list(self.answers.items()),
            "unclaimed": list(self.unclaimed),
            "reserved": [(n.text, repr(kept)) for n, kept in self.reserved.items()],
            "counter": self._counter,
        }


def _check_node(node: Node, leases: list[LeaseState]) -> None:
    assert sorted(node.leases) == sorted(lease.lease_id for lease in leases), node.node_id
    used: Units = {}
    shares: Shares = {}
    for lease in leases:
        add(used, lease.need.but_cpu if lease.blocked else lease.need.items)
        assert sum(lease.gpus.values()) == lease.need.gpu, f"{lease.lease_id} lacks GPUs"
        for index, units in lease.gpus.items():
            shares[index] = shares.get(index, 0) + units
    for index, units in shares.items():
        assert units <= UNIT, f"GPU {index} of {node.node_id} is over-allocated: {units} units"
    for index, free in node.devices.free.items():
        assert free == UNIT - shares.get(index, 0), f"GPU {index} of {node.node_id} leaks"
    for name in {**node.spec.total, **used, **node.available}:
        left = node.spec.total.get(name, 0) - used.get(name, 0)
        assert node.available.get(name, 0) == left, f"{name} of {node.node_id} leaks"
        assert name == "CPU" or left >= 0 or node.spec.total.get(name, 0) == 0, (
            f"{name} of {node.node_id} is over-allocated"
        )
