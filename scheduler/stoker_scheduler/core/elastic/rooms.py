"""The room that elastic jobs may have: what is left once all other work has what it waits for.

Elastic jobs take what is left and give it back on demand. So a round looks at a copy of the state from which
their replicas are taken away: the cycle then places what waits there, by its queues, quotas and priorities,
and what is free after that is theirs to share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.plan import obey
from stoker_scheduler.core.model.nodes import Health, NodeInfo
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.feasibility import (
    RESOURCE_RULES,
    first_obstacle,
    rules_for,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_scheduler.core.model.queues import Account
    from stoker_scheduler.core.queueing.tenants import Vector
    from stoker_scheduler.core.state import State


class Member(NamedTuple):
    """A job of a pool: whom its replicas are charged to, what each needs, and how many it has."""

    job_id: str
    account: Account
    requirements: Requirements
    held: Mapping[str, int]
    max_replicas: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Elastic jobs of one queue whose replicas may be on the same nodes. Its needs are the most of each."""

    queue: str
    requirements: Requirements
    members: tuple[Member, ...]

    @property
    def wanted(self) -> int:
        """The most replicas that its jobs may have."""
        return sum(member.max_replicas for member in self.members)

    def held(self, node_id: str) -> int:
        """Return the replicas that its jobs have on a node."""
        return sum(member.held.get(node_id, 0) for member in self.members)


@dataclass(slots=True)
class Free:
    """The resources of each node that nobody has, or background work that leaves for others.

    Replicas of several pools are counted against them.
    """

    nodes: Mapping[str, NodeInfo]
    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    gpus_taken: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> Free:
        """Return what is free on the nodes of a state."""
        free = cls(state.nodes)
        for lease_id in state.background:
            lease = state.leases[lease_id]
            wanted = lease.requirements
            items = wanted.without_cpu if lease.blocked else wanted.items
            free._add(lease.node_id, items, sum(lease.gpus.values()) // UNIT, -1)
        return free

    def rooms(self, requirements: Requirements) -> dict[str, int]:
        """Return for how many replicas each node has room, without those that have none."""
        rules = [rule for rule in rules_for(requirements) if rule not in RESOURCE_RULES]
        found = {}
        for node_id, node in self.nodes.items():
            if node.spec.health is not Health.ALIVE or first_obstacle(
                node, requirements, tuple(rules)
            ):
                continue
            count = self._count(node_id, node, requirements)
            if count > 0:
                found[node_id] = count
        return found

    def _count(self, node_id: str, node: NodeInfo, requirements: Requirements) -> int:
        taken = self.taken.get(node_id, {})
        counts = [
            (node.available.get(name, 0) - taken.get(name, 0)) // units
            for name, units in requirements.items
            if units
        ]
        if requirements.gpu:
            free = node.devices.whole_rooms(UNIT) - self.gpus_taken.get(node_id, 0)
            counts.append(free * UNIT // requirements.gpu)
        return min(counts, default=0)

    def take(self, requirements: Requirements, allocation: Allocation) -> None:
        """Count replicas that a pool gets."""
        for node_id, count in allocation:
            self._add(node_id, requirements.items, requirements.gpu // UNIT, count)

    def _add(self, node_id: str, items: Vector, gpus: int, sign: int) -> None:
        taken = self.taken.setdefault(node_id, {})
        for name, units in items:
            taken[name] = taken.get(name, 0) + units * sign
        self.gpus_taken[node_id] = self.gpus_taken.get(node_id, 0) + gpus * sign


def without_replicas(twin: State, group_ids: Iterable[str]) -> State:
    """Take the placement groups of elastic jobs from a fork of the state; what waits has its turn then."""
    for group_id in group_ids:
        if group_id in twin.groups or twin.request_index.of(group_id):
            obey(twin, ev.GroupRemoved(at_s=twin.at_s, group_id=group_id))
    return twin


def pools_of(members: Sequence[tuple[str, Member]]) -> list[Pool]:
    """Return the pools of jobs, each given with its queue, in a fixed order."""
    by_key: dict[tuple[object, ...], list[Member]] = {}
    for queue, member in members:
        wanted = member.requirements
        key = (queue, bool(wanted.gpu), wanted.terms, wanted.node_filters, wanted.tolerations)
        by_key.setdefault(key, []).append(member)
    return [
        Pool(str(key[0]), _most(member.requirements for member in some), tuple(some))
        for key, some in sorted(by_key.items(), key=lambda one: repr(one[0]))
    ]


def _most(kinds: Iterable[Requirements]) -> Requirements:
    """Return requirements that suffice for each of some that differ in amounts alone."""
    most: dict[str, int] = {}
    found: Requirements | None = None
    for one in kinds:
        found = found or one
        for name, units in one.items:
            most[name] = max(most.get(name, 0), units)
    assert found is not None
    return replace(found, items=tuple(sorted(most.items())), names=found.names | set(most))


def budgets(pools: Sequence[Pool], weights: Sequence[float], rooms: Sequence[int]) -> list[int]:
    """Return how many replicas each of some pools that want the same room may have, by weighted max-min.

    ``rooms`` is what each could have alone. What one does not want, the others share.
    """
    left, found = max(rooms, default=0), [0] * len(pools)
    open_ = [i for i, pool in enumerate(pools) if min(pool.wanted, rooms[i]) > 0]
    while open_ and left > 0:
        total = sum(weights[i] for i in open_)
        shares = {i: max(1, int(left * weights[i] / total)) for i in open_}
        for i, share in shares.items():
            more = min(share, min(pools[i].wanted, rooms[i]) - found[i], left)
            found[i] += more
            left -= more
        open_ = [i for i in open_ if found[i] < min(pools[i].wanted, rooms[i])]
    return found


def trimmed(pool: Pool, rooms: Mapping[str, int], budget: int) -> dict[str, int]:
    """Return rooms of which there are ``budget`` in all: what the pool has first, then more beside that.

    So no replica moves because another node of the pool has more of them.
    """
    found = dict.fromkeys(rooms, 0)
    order = sorted(rooms, key=lambda name: (-pool.held(name), -rooms[name], name))
    for most in ({name: min(rooms[name], pool.held(name)) for name in rooms}, rooms):
        for node_id in order:
            count = min(most[node_id] - found[node_id], budget)
            found[node_id] += count
            budget -= count
    return {node_id: count for node_id, count in found.items() if count}


def headroom(twin: State, pool: Pool) -> int:
    """Return how many replicas the limits of queues, users and jobs admit, on a state without them."""
    wanted = {one.account: one.max_replicas for one in pool.members}
    return twin.tenants.startable(wanted, twin.cost(pool.requirements))
