"""A node as the scheduler sees it: what it has, what is left, and whether it takes work.

Only the state machine changes these; a plan that is only tried works on copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.devices import Devices, Shares
from stoker_scheduler.core.model.resources import GPU, UNIT, Units, to_units

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Need


class Health(StrEnum):
    """What the gcs says of a node; only ALIVE ones get new leases."""

    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a node is. ``total`` are units without GPUs; ``gpus`` are device indices.

    ``warm`` are the kernel sets that it need not compile.
    """

    node_id: str
    incarnation: int = 1
    health: Health = Health.ALIVE
    total: Units = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    reason: str = ""
    warm: tuple[str, ...] = ()

    @property
    def total_units(self) -> Units:
        """All resources of the idle node, GPUs included."""
        return {**self.total, GPU: UNIT * len(self.gpus)} if self.gpus else dict(self.total)


def make_node_spec(
    node_id: str,
    resources: Mapping[str, float],
    *,
    incarnation: int = 1,
    device_indices: tuple[int, ...] = (),
    labels: Mapping[str, str] | None = None,
    health: Health = Health.ALIVE,
    draining: bool = False,
    reason: str = "",
    warm: tuple[str, ...] = (),
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
        incarnation=incarnation,
        health=health,
        total=units,
        gpus=tuple(sorted(known)),
        labels=dict(labels or {}),
        draining=draining,
        reason=reason,
        warm=warm,
    )


ANY_ENV = "*"
"""Stands for all runtime environments among the refusals of a node that fails as a whole."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Starts that failed one after the other; ``because`` is empty once the node is tried again."""

    count: int
    until_s: float
    because: str


class Node:
    """A node's spec and what is left of it.

    ``available`` may be negative: a worker that wakes up from ``get`` takes its CPU back even if
    it was lent out meanwhile. ``reserved_for`` keeps what ``reserved_names`` says for one need.
    ``refusals`` are by the runtime environment of what did not start: others are not affected,
    unless the node itself failed (ANY_ENV).
    """

    __slots__ = (
        "available",
        "devices",
        "leases",
        "refusals",
        "reserved_for",
        "reserved_names",
        "spec",
        "turn",
    )

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.available: Units = dict(spec.total)
        self.devices = Devices(spec.gpus)
        self.leases: dict[str, None] = {}
        self.reserved_for: Need | None = None
        self.reserved_names: frozenset[str] = frozenset()
        self.refusals: dict[str, Refused] = {}
        self.turn = 0
        """Rises with each spread lease that it gets: of equal nodes, the lowest is next."""

    @property
    def node_id(self) -> str:
        """The node's id."""
        return self.spec.node_id

    @property
    def available_units(self) -> Units:
        """What no lease holds, GPUs included."""
        gpu = self.devices.free_units
        return {**self.available, GPU: gpu} if self.spec.gpus else dict(self.available)

    def refused(self, env: str) -> Refused | None:
        """Return the failed start that keeps the node from more with ``env``, if there is one."""
        for key in (ANY_ENV, env):
            found = self.refusals.get(key)
            if found is not None and found.because:
                return found
        return None

    def take(self, need: Need, gpus: Shares, *, blocked: bool = False) -> None:
        """Give ``need`` and the chosen ``gpus`` to a lease (no CPU if it is blocked)."""
        available = self.available
        for name, count in need.but_cpu if blocked else need.items:
            available[name] = available.get(name, 0) - count
        if gpus:
            self.devices.take(gpus)

    def give(self, need: Need, gpus: Shares, *, blocked: bool = False) -> None:
        """Take back what a lease held."""
        available = self.available
        for name, count in need.but_cpu if blocked else need.items:
            available[name] = available.get(name, 0) + count
        if gpus:
            self.devices.give(gpus)

    def copy(self) -> Node:
        """Return an independent copy, for plans that are only tried."""
        twin = Node.__new__(Node)
        twin.spec = self.spec
        twin.available = dict(self.available)
        twin.devices = self.devices.copy()
        twin.leases = dict(self.leases)
        twin.reserved_for = self.reserved_for
        twin.reserved_names = self.reserved_names
        twin.refusals = self.refusals
        twin.turn = self.turn
        return twin

    def change(self, spec: NodeSpec) -> None:
        """Adopt a new spec of the same incarnation, keeping what leases hold."""
        for name in dict.fromkeys((*self.spec.total, *spec.total)):
            delta = spec.total.get(name, 0) - self.spec.total.get(name, 0)
            if delta:
                self.available[name] = self.available.get(name, 0) + delta
        if spec.gpus != self.spec.gpus:
            used = {i: UNIT - free for i, free in self.devices.free.items() if free != UNIT}
            self.devices = Devices(spec.gpus)
            self.devices.take({i: units for i, units in used.items() if i in spec.gpus})
        self.spec = spec
