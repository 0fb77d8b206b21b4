"""A node as the scheduler sees it: what it has, what is available, and whether it takes work.

Only the state machine changes these; dry runs work on copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.devices import NO_FACTS, DeviceFacts, Devices, Shares
from stoker_scheduler.core.model.resources import GPU, UNIT, Units, to_units
from stoker_scheduler.core.model.taints import DISCOURAGING, FORBIDDING, Effect, Taint

if TYPE_CHECKING:
    from stoker_scheduler.core.model.extenders import ExtenderAnswer
    from stoker_scheduler.core.model.gangs import Gang
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.model.topology import Topology


class Health(StrEnum):
    """The gcs's verdict on a node; only ALIVE ones get new leases."""

    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """The description of a node. ``total`` are units without GPUs; ``gpus`` are device indices.

    ``gpu_facts`` are what is known of them.
    ``warm`` are the kernel sets that it need not compile. ``cordon`` says why it takes no new work, empty
    while it does; ``drain_until_s`` is when all that it has must have left, if that is so.
    """

    node_id: str
    hostname: str = ""
    incarnation: int = 1
    health: Health = Health.ALIVE
    total: Units = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    gpu_facts: DeviceFacts = NO_FACTS
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    warm: tuple[str, ...] = ()
    cordon: str = ""
    drain_until_s: float | None = None
    taints: tuple[Taint, ...] = ()
    pressure: str = ""
    """What it is short of, with the numbers; empty while it takes new work."""
    closed: bool = field(default=False, init=False, compare=False)
    """Whether some work, or all, must not be placed here."""
    shunned: bool = field(default=False, init=False, compare=False)
    """Whether some work prefers other nodes."""
    evicts: bool = field(default=False, init=False, compare=False)
    """Whether some work must leave."""

    def __post_init__(self) -> None:
        effects = {taint.effect for taint in self.taints}
        drains = self.drain_until_s is not None
        is_closed = bool(self.cordon or self.pressure) or not effects.isdisjoint(FORBIDDING)
        object.__setattr__(self, "closed", is_closed)
        object.__setattr__(self, "shunned", not effects.isdisjoint(DISCOURAGING))
        object.__setattr__(self, "evicts", drains or Effect.NO_EXECUTE in effects)

    @property
    def total_units(self) -> Units:
        """All resources of the idle node, GPUs included."""
        return {**self.total, GPU: UNIT * len(self.gpus)} if self.gpus else dict(self.total)


def make_node_spec(
    node_id: str,
    resources: Mapping[str, float],
    *,
    hostname: str = "",
    incarnation: int = 1,
    device_indices: tuple[int, ...] = (),
    device_memory: Mapping[int, int] | None = None,
    mig_slices: Collection[int] = (),
    topology: Topology | None = None,
    quarantined: Mapping[int, str] | None = None,
    labels: Mapping[str, str] | None = None,
    health: Health = Health.ALIVE,
    reason: str = "",
    warm: tuple[str, ...] = (),
    cordon: str = "",
    drain_until_s: float | None = None,
    taints: tuple[Taint, ...] = (),
    pressure: str = "",
) -> NodeSpec:
    """Return the spec of a node whose ``resources`` are amounts as the nodelet reports them.

    The count of GPUs decides; indices come from the devices as far as there are any.
    """
    units = to_units(resources)
    count = units.pop(GPU, 0) // UNIT
    known = sorted(device_indices)[:count]
    free_names = (index for index in range(count + len(known)) if index not in known)
    while len(known) < count:
        known.append(next(free_names))
    return NodeSpec(
        node_id=node_id,
        hostname=hostname,
        incarnation=incarnation,
        health=health,
        total=units,
        gpus=tuple(sorted(known)),
        gpu_facts=DeviceFacts(
            memory={i: n for i, n in sorted((device_memory or {}).items()) if n and i in known},
            slices=frozenset(mig_slices),
            topology=topology,
            quarantined=dict(sorted((quarantined or {}).items())),
        ),
        labels=dict(labels or {}),
        reason=reason,
        warm=warm,
        cordon=cordon,
        drain_until_s=drain_until_s,
        taints=taints,
        pressure=pressure,
    )


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was lost, as it would be if it came back idle."""

    node: NodeInfo
    at_s: float


ANY_ENV = "*"
"""Stands for all runtime environments among the backoffs of a node that fails as a whole."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Starts that failed one after the other; ``cause`` is empty once the node is tried again."""

    count: int
    until_s: float
    cause: str


class NodeInfo:
    """A node's spec and what is available of it.

    ``available`` may be negative: a worker that wakes up from ``get`` takes its CPU back even if
    it was allocated to another meanwhile. The resources ``reserved_names`` are for ``reserved_for`` alone.
    ``backoffs`` are by the runtime environment of what did not start: others are not affected,
    unless the node itself failed (ANY_ENV). A bundle of a placement group is a node of its own within one:
    ``bundle_lease_id`` is the lease that holds its resources there, empty for nodes themselves.
    """

    __slots__ = (
        "allocations",
        "answers",
        "available",
        "backoffs",
        "bundle_lease_id",
        "devices",
        "leases",
        "reserved_for",
        "reserved_names",
        "slow_ranks",
        "spec",
        "turn",
    )

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.allocations = 0
        """Rises whenever less is available than before."""
        self.available: Units = dict(spec.total)
        self.devices = Devices.whole(spec.gpus, spec.gpu_facts)
        self.leases: dict[str, None] = {}
        self.reserved_for: Requirements | Gang | None = None
        self.reserved_names: frozenset[str] = frozenset()
        self.backoffs: dict[str, Backoff] = {}
        self.bundle_lease_id = ""
        self.answers: Mapping[Requirements, ExtenderAnswer] = {}
        """What extenders say of all nodes: that of the state."""
        self.slow_ranks: dict[str, float] = {}
        """Rank that was slow here -> when that is forgotten."""
        self.turn = 0
        """Rises with each lease of a policy that takes turns: of equal nodes, the lowest is next."""

    @property
    def node_id(self) -> str:
        """The node's id."""
        return self.spec.node_id

    @property
    def available_units(self) -> Units:
        """The resources that no lease has, GPUs included."""
        gpu = self.devices.free_units
        return {**self.available, GPU: gpu} if self.spec.gpus else dict(self.available)

    def backoff(self, env: str) -> Backoff | None:
        """Return the failed start that keeps the node from more with ``env``, if there is one."""
        for key in (ANY_ENV, env):
            backoff = self.backoffs.get(key)
            if backoff is not None and backoff.cause:
                return backoff
        return None

    def choose(
        self, requirements: Requirements, among: Collection[int] | None = None
    ) -> Shares | None:
        """Return the parts of GPUs that a lease would get here now, or None; whole ones of ``among``."""
        return self.devices.choose(requirements.gpu, requirements.gpu_memory, among)

    def allocate(self, requirements: Requirements, gpus: Shares, *, blocked: bool = False) -> None:
        """Allocate ``requirements`` and the chosen ``gpus`` (no CPU for a blocked lease)."""
        self.allocations += 1
        available = self.available
        for name, count in requirements.without_cpu if blocked else requirements.items:
            available[name] = available.get(name, 0) - count
        if gpus:
            self.devices.allocate(gpus)

    def free(self, requirements: Requirements, gpus: Shares, *, blocked: bool = False) -> None:
        """Free what was allocated for a lease."""
        available = self.available
        for name, count in requirements.without_cpu if blocked else requirements.items:
            available[name] = available.get(name, 0) + count
        if gpus:
            self.devices.free(gpus)

    def copy(self) -> NodeInfo:
        """Return an independent copy, for dry runs."""
        twin = NodeInfo.__new__(NodeInfo)
        twin.spec = self.spec
        twin.allocations = self.allocations
        twin.available = dict(self.available)
        twin.devices = self.devices.copy()
        twin.leases = dict(self.leases)
        twin.reserved_for = self.reserved_for
        twin.reserved_names = self.reserved_names
        twin.backoffs = self.backoffs
        twin.answers = self.answers
        twin.slow_ranks = self.slow_ranks
        twin.bundle_lease_id = self.bundle_lease_id
        twin.turn = self.turn
        return twin

    def change(self, spec: NodeSpec) -> None:
        """Apply a new spec of the same incarnation; what is allocated stays so."""
        for name in dict.fromkeys((*self.spec.total, *spec.total)):
            delta = spec.total.get(name, 0) - self.spec.total.get(name, 0)
            if delta:
                self.available[name] = self.available.get(name, 0) + delta
        if spec.gpus == self.spec.gpus:
            if spec.gpu_facts != self.spec.gpu_facts:
                self.devices.learn(spec.gpu_facts)
        else:
            used = {
                i: UNIT - free for i, free in self.devices.free_by_device.items() if free != UNIT
            }
            self.devices = Devices.whole(spec.gpus, spec.gpu_facts)
            self.devices.allocate({i: units for i, units in used.items() if i in spec.gpus})
        self.spec = spec
