"""The scheduler's whole state, and the invariants that hold after every event.

Owned by one engine; changed only by ``machine`` and the modules it calls. Iteration is over dicts in
insertion order, never over sets, so that equal events give equal states whatever the hash seed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.index import Index
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.preemptions import Preemptions
from stoker_scheduler.core.leases.starting import StartingLeases
from stoker_scheduler.core.model.extenders import ExtenderAnswer
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.groups import PlacementGroup
from stoker_scheduler.core.model.nodes import Health, LostNode, NodeInfo, NodeSpec
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import GPU, UNIT, Units, add
from stoker_scheduler.core.placement.feasibility import first_obstacle, rules_for
from stoker_scheduler.core.placement.gang import GangPlacement, GangRanking
from stoker_scheduler.core.placement.ranking import DirtyNodes, Ranking
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.queueing.queue import PendingRequest, RequestQueue
from stoker_scheduler.core.queueing.tenants import Hold, Tenants, dominant_share

if TYPE_CHECKING:
    from stoker_scheduler.core.model.devices import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """The numbers that shape decisions; all times in seconds."""

    score: ScorePolicy = field(default_factory=ScorePolicy)
    lease_ttl_s: float = 10.0
    """How long a lease lives that its owner lists no more."""
    unconfirmed_ttl_s: float = 600.0
    """How long one lives that its owner has not listed yet: it may be busy, or stopped."""
    infeasible_grace_s: float = 10.0
    no_nodes_grace_s: float = 30.0
    """Zero nodes prove nothing about what could fit, so they get more time to come."""
    node_return_s: float = 60.0
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
    usage_half_life_s: float = 3600.0
    """What a queue has used counts half as much against it after this."""
    remember_answers_s: float = 60.0
    remember_slow_ranks_s: float = 600.0
    preemption_grace_s: float = 30.0
    """How long preemptible work that names no grace has from its notice to its end."""
    background_grace_s: float = 2.0
    """The same for background work: other work waits for its end."""
    stop_margin_s: float = 10.0
    """A lease that its nodelet has not ended so long after that is killed."""


class Timer(Enum):
    """The kinds of timers; the comment names the timer's subject, and why it is looked at."""

    DEADLINE = "deadline"  # a request: its wait has passed
    LINGER = "linger"  # a request: it has some of its leases and waited a little for more
    EVICT = "evict"  # a node: leases must leave it
    EXPIRY = "expiry"  # a lease: its owner does not say that it has it
    ORPHAN = "orphan"  # a lease: its request was not repeated
    BACKOFF = "backoff"  # a node: leases may start there again
    EXTENDERS = "extenders"  # nothing: an answer of extenders is over
    SLOW_RANK = "slow rank"  # a node: a slow rank there is forgotten
    STOP = "stop"  # a lease: it is preempted, and should have ended
    RATE = "rate"  # a queue: its rate limit allows one more start
    CYCLE = "cycle"  # nothing: only the scheduling cycle is to run
    REVIEW = "review"  # nothing: what waits is to be looked at, for preemption and reservations


@dataclass(slots=True)
class Answer:
    """The leases that a request was granted, for when it is sent again."""

    at_s: float
    lease_ids: tuple[str, ...]


@dataclass(slots=True)
class Reservation:
    """Nodes reserved for one requirement (for a gang, one or more).

    ``unwanted_since_s`` is when its last request left the queue.
    """

    node_ids: tuple[str, ...]
    until_s: float
    unwanted_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Force:
    """Stops for requests of one class that have not got the room yet, and when there may be more for them."""

    until_s: float
    times: int


MAX_RANKINGS = 4096
MAX_RANKED = 2_000_000
"""Entries of all rankings, of some 150 bytes each: the oldest go first."""
MAX_GANG_RANKINGS = 256
MAX_REMEMBERED_LOOKS = 4096


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
    tenants: Tenants = field(default_factory=Tenants)
    usage: dict[Account, Units] = field(default_factory=dict)
    """Account -> the resources that its leases have allocated."""
    idle: dict[str, None] = field(default_factory=dict)
    """Leases that their owners do not use and that are not preempted."""
    orphaned: dict[str, None] = field(default_factory=dict)
    """Leases that started, or are starting, for a request that has ended."""
    preemptible: dict[str, None] = field(default_factory=dict)
    """Leases that may be stopped."""
    background: dict[str, None] = field(default_factory=dict)
    """Leases of background work."""
    starting: StartingLeases = field(default_factory=StartingLeases)
    priorities: dict[str, dict[int, int]] = field(default_factory=dict)
    """Queue -> priority -> how many leases of the queue have it."""
    lease_index: Index = field(default_factory=Index)
    request_index: Index = field(default_factory=Index)
    finished_jobs: dict[str, float] = field(default_factory=dict)
    infeasible_since_s: dict[Requirements | Gang, float] = field(default_factory=dict)
    lost_nodes: dict[str, LostNode] = field(default_factory=dict)
    feasible: dict[Requirements | Gang, bool] = field(default_factory=dict)
    """Requirements -> whether an idle node could take them; cleared when the nodes change."""
    extender_answers: dict[Requirements, ExtenderAnswer] = field(default_factory=dict)
    extenders_asked: dict[Requirements, None] = field(default_factory=dict)
    """Requirements about which extenders have not answered yet."""
    reserved: dict[Requirements | Gang, Reservation] = field(default_factory=dict)
    preemptions: Preemptions = field(default_factory=Preemptions)
    preempted: dict[tuple[Account, str], int] = field(default_factory=dict)
    """Account and class -> how often its work was ended for other work; of the last few thousand."""
    forced: dict[tuple[Account, str], Force] = field(default_factory=dict)
    """Account and class -> what was stopped for it; until it gets a lease."""
    preemption_due_s: float = 0.0
    """Before that, reviews do not look again for busy leases to preempt and for nodes to reserve."""
    review_at_s: float = math.inf
    """When the timer of the next review is set to."""
    preemption_checked: dict[Requirements | Gang, None] = field(default_factory=dict)
    """Requirements that were looked at since."""
    last_looks: dict[Requirements | Gang, int] = field(default_factory=dict)
    """Requirements -> when that was, in the order of such looks; of the last few thousand."""
    background_checked: dict[Requirements | Gang, None] = field(default_factory=dict)
    """Requirements for which the end of background leases makes no room, as of the last review."""
    looks: int = 0
    """How many times that was done since the last review that did it."""
    reserve_due_s: dict[Requirements | Gang, float] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    removed_groups: dict[str, None] = field(default_factory=dict)
    incomplete: dict[str, None] = field(default_factory=dict)
    """Bundles of gangs that can no longer be granted whole, to be released in this step."""
    review_due: bool = False
    """Whether the next cycle looks at all that waits, not only at what the event may have helped."""
    idle_grew: bool = False
    """Whether there are idle leases that no cycle has seen."""
    rate_due_s: dict[str, float] = field(default_factory=dict)
    """Queue -> when its timer of kind RATE is set to."""
    unsettled: dict[str, None] = field(default_factory=dict)
    """Requests that may be granted at the end of this step."""
    timers: list[tuple[float, int, Timer, str]] = field(default_factory=list)
    at_s: float = 0.0
    capacity: Units = field(default_factory=dict)
    """Sum of the totals of ALIVE nodes."""
    smallest_gpu: int = 0
    """The least memory that a GPU has, in bytes; 0 if none is known."""
    _gpu_sizes: dict[int, int] = field(default_factory=dict)
    """Bytes -> the number of GPUs that have so much."""
    wake_at_s: float = float("inf")
    placed: int = 0
    _counter: int = 0
    _dirty: DirtyNodes = field(default_factory=DirtyNodes)
    _changes: DirtyNodes = field(default_factory=DirtyNodes)
    """All changes of nodes, also to less: for gangs, and for filters that ask what is free."""
    _changes_read: bool = False
    _rankings: dict[tuple[Requirements, str], Ranking] = field(default_factory=dict)
    _gang_rankings: dict[Gang, GangRanking] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tenants.half_life_s = self.policy.usage_half_life_s

    def next_number(self) -> int:
        """Return the next of a sequence, for ids and ties."""
        self._counter += 1
        return self._counter

    def mark_dirty(self, node_id: str) -> None:
        """Have every ranking look at the node again: what it can take has changed."""
        node = self.nodes.get(node_id)
        if node is not None and self.queue.blocked.members:
            self.queue.wake(self.queue.blocked.changed(node))
        self._dirty.add(node_id, None, len(self.nodes))
        self._changes.add(node_id, None, len(self.nodes))

    def mark_freed(self, node_id: str, names: frozenset[str]) -> None:
        """Have the rankings look at the node again that ask for some of ``names``: it has more of these."""
        if self.queue.blocked.members:
            self.queue.wake(self.queue.blocked.freed(self.nodes[node_id], names))
        self._dirty.add(node_id, names, len(self.nodes))
        self.mark_allocated(node_id)

    def mark_group(self, group_id: str) -> None:
        """Have the next cycle look at what waits for a bundle of the group: one has more room."""
        self.queue.wake(self.queue.blocked.in_group(group_id))

    def mark_allocated(self, node_id: str) -> None:
        """Have those rankings look at the node again that less may help; others see it in time."""
        if self._changes_read:
            self._changes.add(node_id, None, len(self.nodes))
            if self.queue.blocked.readers:
                self.queue.wake(self.queue.blocked.allocated(self.nodes[node_id]))

    def set_review(self, at_s: float) -> None:
        """Have all that waits be looked at again at ``at_s``, or before."""
        if at_s < self.review_at_s:
            self.review_at_s = at_s
            self.set_timer(at_s, Timer.REVIEW)

    def set_rate_timer(self, hold: Hold) -> None:
        """Have what a rate limit holds be looked at again when that is over."""
        if hold.until_s < self.rate_due_s.get(hold.queue, math.inf):
            self.rate_due_s[hold.queue] = hold.until_s
            self.set_timer(hold.until_s, Timer.RATE, hold.queue)

    def set_timer(self, at_s: float, timer: Timer, subject: str = "") -> None:
        """Have ``timer`` run for ``subject`` at ``at_s``."""
        heapq.heappush(self.timers, (at_s, self.next_number(), timer, subject))

    def fits(self, requirements: Requirements | Gang) -> bool:
        """Return whether ``requirements`` could be assigned now."""
        if isinstance(requirements, Gang):
            return self.best_placement(requirements) is not None
        return self.best_place(requirements) is not None

    def best_placement(self, gang: Gang) -> GangPlacement | None:
        """Return the nodes to which the bundles of ``gang`` would be assigned now, or None."""
        return self._gang_ranking(gang).best(self.nodes, self._changes, self.policy.score)

    def best_placement_if(
        self, gang: Gang, changed: Mapping[str, NodeInfo]
    ) -> GangPlacement | None:
        """Return what :meth:`best_placement` would if some nodes were as ``changed`` says."""
        ranking = self._gang_ranking(gang)
        return ranking.best_if(self.nodes, self._changes, self.policy.score, changed)

    def gang_room(self, gang: Gang) -> tuple[int, ...]:
        """Return how many bundles of each of ``gang.kinds`` have room now, each kind for itself."""
        return self._gang_ranking(gang).room(self.nodes, self._changes)

    def _gang_ranking(self, gang: Gang) -> GangRanking:
        ranking = self._gang_rankings.get(gang)
        if ranking is None:
            if len(self._gang_rankings) >= MAX_GANG_RANKINGS:
                del self._gang_rankings[next(iter(self._gang_rankings))]
            ranking = self._gang_rankings[gang] = GangRanking(gang)
            self._changes_read = True
        return ranking

    def best_place(
        self, requirements: Requirements, pending: PendingRequest | None = None
    ) -> NodeInfo | None:
        """Return the node, or bundle, to which ``requirements`` would be assigned now, or None."""
        if requirements.group_id:
            group = self.groups.get(requirements.group_id)
            rules = rules_for(requirements)
            if group is None:
                return None
            return group.best(
                requirements, lambda place: first_obstacle(place, requirements, rules) is None
            )
        kernels = pending.request.kernels if pending is not None else ""
        ranking = self._rankings.get((requirements, kernels))
        if ranking is None:
            ranking = self._new_ranking(requirements, kernels)
        changes = self._changes if requirements.reads else self._dirty
        locality = pending.request.locality if pending is not None else None
        node_id = ranking.best(self.nodes, changes, self.policy.score, locality)
        return None if node_id is None else self.nodes[node_id]

    def _new_ranking(self, requirements: Requirements, kernels: str) -> Ranking:
        rankings = self._rankings
        ranked = sum(map(len, rankings.values())) + len(self.nodes)
        while rankings and (len(rankings) >= MAX_RANKINGS or ranked > MAX_RANKED):
            ranked -= len(rankings.pop(next(iter(rankings))))
        ranking = rankings[requirements, kernels] = Ranking(requirements, kernels)
        self._changes_read |= bool(requirements.reads)
        return ranking

    def forget_rankings(self, requirements: Requirements) -> None:
        """Have every node looked at again for ``requirements``, alone and in gangs."""
        for key in [key for key in self._rankings if key[0] == requirements]:
            del self._rankings[key]
        for gang in [gang for gang in self._gang_rankings if requirements in gang.kinds]:
            del self._gang_rankings[gang]

    def share(self, account: Account) -> float:
        """Return the account's dominant share of the cluster, 0 to 1 (more if overcommitted)."""
        used = self.usage.get(account)
        return dominant_share(used, self.capacity) if used else 0.0

    def charge(self, account: Account, resources: tuple[tuple[str, int], ...], sign: int) -> None:
        """Add resources to an account's usage, or with ``sign`` -1 subtract them."""
        used = self.usage.setdefault(account, {})
        add(used, resources, sign)
        if not used:
            del self.usage[account]
        self.tenants.charge(account, resources, sign, self.at_s)
        if sign < 0 and self.queue.held:
            self.wake_held(account.queue)

    def note_look(self, requirements: Requirements | Gang) -> None:
        """Note that busy leases are looked at for ``requirements`` now."""
        self.last_looks.pop(requirements, None)
        self.last_looks[requirements] = self.next_number()
        if len(self.last_looks) > MAX_REMEMBERED_LOOKS:
            del self.last_looks[next(iter(self.last_looks))]

    def count_priority(self, lease: LeaseState, change: int) -> None:
        """Count a lease that comes (1) or goes (-1) among those of its queue and priority."""
        queue, priority = lease.account.queue, lease.priority
        known = self.priorities.get(queue)
        if known is None:
            known = self.priorities[queue] = {}
        count = known.get(priority, 0) + change
        if count:
            known[priority] = count
            return
        del known[priority]
        if not known:
            del self.priorities[queue]

    def hold(self, account: Account, requirements: Requirements | Gang) -> Hold | None:
        """Return the limit that keeps the account's work from starting now, or None.

        What goes into a bundle has none: the bundle has been counted.
        """
        if not isinstance(requirements, Gang) and requirements.group_id:
            return None
        if requirements.background:
            return self.tenants.stopped(account)
        return self.tenants.hold(account, self.cost(requirements), self.at_s)

    def cost(self, requirements: Requirements | Gang) -> tuple[tuple[str, int], ...]:
        """Return what limits and shares count: a part of a GPU's memory as the part of the smallest GPU.

        Background work counts for nothing.
        """
        if requirements.background:
            return ()
        if isinstance(requirements, Gang):
            if not any(bundle.gpu_memory for bundle in requirements.kinds):
                return requirements.vector
            total: Units = {}
            for bundle in requirements.bundles:
                add(total, self.cost(bundle))
            return tuple(total.items())
        if not requirements.gpu_memory:
            return requirements.vector
        least = self.smallest_gpu
        units = min(UNIT, -(-requirements.gpu_memory * UNIT // least)) if least else UNIT
        return (*requirements.items, (GPU, units))

    def grace_s(self, lease: LeaseState) -> float:
        """Return how long a lease that is stopped has from its notice to its end."""
        if lease.preemption_grace_s is not None:
            return lease.preemption_grace_s
        policy, is_background = self.policy, lease.requirements.background
        return policy.background_grace_s if is_background else policy.preemption_grace_s

    def is_infeasible(self, pending: PendingRequest) -> bool:
        """Return whether a request waits for what no node, or no limit, could ever give it."""
        hold = self.hold(pending.account, pending.requirements)
        return pending.requirements in self.infeasible_since_s or (
            hold is not None and hold.is_final
        )

    def wake_held(self, queue: str = "") -> None:
        """Have the next cycle look at what no limit holds any more, of those that ``queue`` bears on."""
        names = self.tenants.names_above(queue) if queue else ()
        for requirements, holds in self.queue.held.items():
            for account, hold in holds.items():
                if names and hold.queue not in names:
                    continue
                now = self.hold(account, requirements)
                if now is None:
                    self.queue.wake((requirements,))
                    break
                # What one limit holds no more, another may.
                holds[account] = now
                self.set_rate_timer(now)

    def node_changed(self, before: NodeSpec | None, after: NodeSpec | None) -> None:
        """Count a node that came, went or changed in the capacity."""
        self.feasible.clear()
        self.review_due = True
        for spec, sign in ((before, -1), (after, 1)):
            if spec is None:
                continue
            if spec.health is Health.ALIVE:
                add(self.capacity, spec.total_units.items(), sign)
            for size in spec.gpu_facts.memory.values():
                self._gpu_sizes[size] = self._gpu_sizes.get(size, 0) + sign
        self.smallest_gpu = min((n for n, count in self._gpu_sizes.items() if count), default=0)
        self.tenants.capacity = self.capacity

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Called by tests after every event."""
        by_node: dict[str, list[LeaseState]] = {node_id: [] for node_id in self.nodes}
        by_bundle: dict[str, list[LeaseState]] = {
            lease.lease_id: [] for lease in self.leases.values() if lease.kind is Kind.BUNDLE
        }
        usage: dict[Account, Units] = {}
        for lease in self.leases.values():
            assert lease.node_id in by_node, (
                f"{lease.lease_id} is on the unknown node {lease.node_id}"
            )
            self._check_lease(lease)
            if lease.in_bundle:
                by_bundle[lease.place.bundle_lease_id].append(lease)
                continue
            assert lease.place is self.nodes[lease.node_id], lease.lease_id
            by_node[lease.node_id].append(lease)
            add(usage.setdefault(lease.account, {}), lease.charged)
        for node_id, node in self.nodes.items():
            _check_node(node, by_node[node_id])
        self._check_groups(by_bundle)
        used = {account: units for account, units in usage.items() if units}
        assert self.usage == used, "usage is not what leases have allocated"
        capacity: Units = {}
        for node in self.nodes.values():
            if node.spec.health is Health.ALIVE:
                add(capacity, node.spec.total_units.items())
        assert self.capacity == capacity, "the capacity is not that of the nodes"
        self.tenants.check(self.usage)
        starting = {i for i, lease in self.leases.items() if lease.phase is Phase.STARTING}
        assert set(self.starting.lease_ids()) == starting, "the index of starting leases is wrong"
        preemptible = {i for i, lease in self.leases.items() if lease.preemptible}
        assert set(self.preemptible) == preemptible, "the index of preemptible leases is wrong"
        priorities: dict[str, dict[int, int]] = {}
        for lease in self.leases.values():
            known = priorities.setdefault(lease.account.queue, {})
            known[lease.priority] = known.get(lease.priority, 0) + 1
        assert self.priorities == priorities, "the priorities are not those of the leases"
        background = {i for i, lease in self.leases.items() if lease.requirements.background}
        assert set(self.background) == background, "the index of background leases is wrong"
        self.lease_index.check((i, lease.belongs_to) for i, lease in self.leases.items())
        self.request_index.check((i, one.belongs_to) for i, one in self.pending.items())
        self._check_pending()
        self.preemptions.check(self.leases)
        for requirements, reservation in self.reserved.items():
            for node_id in reservation.node_ids:
                reserved_for = self.nodes[node_id].reserved_for
                assert reserved_for == requirements, "a reservation is one-sided"
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

    def _check_groups(self, by_bundle: dict[str, list[LeaseState]]) -> None:
        places = {}
        for group in self.groups.values():
            for index, place in group.bundles.items():
                lease = self.leases[place.bundle_lease_id]
                assert (lease.group_id, lease.bundle) == (group.group_id, index), lease.lease_id
                assert lease.phase is Phase.HELD, f"{lease.lease_id} is {lease.phase}"
                places[lease.lease_id] = place
        for lease_id, inside in by_bundle.items():
            for place in dict.fromkeys([lease.place for lease in inside]):
                assert places.setdefault(lease_id, place) is place, f"{lease_id} is two places"
        for lease_id, place in places.items():
            _check_node(place, by_bundle[lease_id])

    def _check_pending(self) -> None:
        for request_id, pending in self.pending.items():
            assert pending.wanted >= 0, request_id
            assert (pending in self.queue) == (pending.wanted > 0), (
                f"{request_id} waits and wants nothing"
            )
            gang, held = pending.requirements, len(pending.starting) + len(pending.ready)
            assert not isinstance(gang, Gang) or held == (
                0 if pending.wanted else len(gang.bundles)
            ), f"{request_id} has {held} of {gang.text}"
            for lease_id in (*pending.starting, *pending.ready):
                phase = self.leases[lease_id].phase
                assert phase is (Phase.STARTING if lease_id in pending.starting else Phase.READY)
        for requirements in self.queue.subqueues:
            if requirements in self.queue.open:
                continue
            if requirements in self.queue.blocked:
                assert not self.fits(requirements), f"{requirements.text} fits, and waits"
                continue
            holds = self.queue.held.get(requirements, {})
            for account in self.queue.subqueues[requirements].accounts:
                assert account in holds, f"{requirements.text} of {account} is not looked at"
                until_s = holds[account].until_s
                if until_s == math.inf:
                    held = self.hold(account, requirements) is not None
                else:
                    held = self.rate_due_s.get(account.queue, math.inf) <= until_s
                assert held, f"{requirements.text} of {account} may start, and waits"
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
    """Check the accounts of a node, or of a bundle, against the leases there."""
    assert sorted(node.leases) == sorted(lease.lease_id for lease in leases), node.node_id
    used: Units = {}
    for lease in leases:
        add(used, lease.requirements.without_cpu if lease.blocked else lease.requirements.items)
    for name in {**node.spec.total, **used, **node.available}:
        left = node.spec.total.get(name, 0) - used.get(name, 0)
        assert node.available.get(name, 0) == left, f"{name} of {node.node_id} leaks"
        assert name == "CPU" or left >= 0 or node.spec.total.get(name, 0) == 0, (
            f"{name} of {node.node_id} is over-allocated"
        )
    _check_devices(node, leases)


def _check_devices(node: NodeInfo, leases: list[LeaseState]) -> None:
    shares: Shares = {}
    for lease in leases:
        wanted = lease.requirements
        serves = node.devices.serves(lease.gpus, wanted.gpu, wanted.gpu_memory)
        assert serves, f"{lease.lease_id} lacks GPUs"
        for index, units in lease.gpus.items():
            shares[index] = shares.get(index, 0) + units
    total = node.devices.total
    for index, units in shares.items():
        over = f"GPU {index} of {node.node_id} is over-allocated: {units} units"
        assert units <= total.get(index, UNIT), over
    for index, free in node.devices.free_by_device.items():
        assert free == total[index] - shares.get(index, 0), f"GPU {index} of {node.node_id} leaks"
    node.devices.check()
