"""One lease in the state: its phase, who has it, and what it has allocated.

The phases and their order are here alone; ``lifecycle`` makes the moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import ANY_BUNDLE, Requirements
from stoker_scheduler.core.model.resources import CPU, GPU


class Phase(StrEnum):
    """STARTING -> READY -> HELD -> RELEASING -> gone; any phase may end by the node's loss."""

    STARTING = "STARTING"
    """Resources are allocated; the nodelet is asked for a worker."""
    READY = "READY"
    """A worker is there; the lease is not granted to its owner yet."""
    HELD = "HELD"
    """Granted: the owner has been sent the lease."""
    RELEASING = "RELEASING"
    """Over; its resources are free when the nodelet confirms."""


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
    account: Account
    job_id: str
    kind: Kind
    node_id: str
    incarnation: int
    requirements: Requirements
    gpus: Shares
    class_key: str
    priority: int
    granted_at_s: float
    since_s: float
    """Since when its request had waited."""
    place: NodeInfo = field(repr=False)
    """The node, or the bundle on it, that its resources are of."""
    phase: Phase = Phase.STARTING
    request_id: str = ""
    owner_node_id: str = ""
    expires_at_s: float | None = None
    """When it ends unless its owner says that it has it; None: with its owner."""
    unlisted_at_s: float | None = None
    """When its owner, which has not listed it yet, first left it out of its list."""
    blocked: bool = False
    idle: bool = False
    preempted: bool = False
    preemptible: bool = False
    """Whether it may be ended while it is in use."""
    preemption_grace_s: float | None = None
    effective_priority: int = 0
    """The priority that it was granted by: its own, and what its request gained while it waited."""
    preemptions: int = 0
    """How often work of its class was ended for other work before."""
    stop_reason: str = ""
    """What it is ended for, if it is."""
    kill: bool = False
    actor_id: str = ""
    name: str = ""
    group_id: str = ""
    bundle: int = ANY_BUNDLE
    """The number of the bundle that it holds, or that it is in."""
    holds: NodeInfo | None = field(default=None, repr=False)
    """The place that a granted bundle is."""
    ended: bool = False
    """Whether the nodelet has confirmed the end of a bundle in which leases are still ending."""

    @property
    def belongs_to(self) -> tuple[str, ...]:
        """Its owner, job, placement group and its owner's node, whose end is its end."""
        return self.owner_id, self.job_id, self.group_id, self.owner_node_id

    @property
    def in_bundle(self) -> bool:
        """Whether its resources are of a bundle, whose lease has them on the node."""
        return self.place.bundle_lease_id != ""

    def move(self, phase: Phase) -> None:
        """Go to the next phase; a move that the table lacks is a bug."""
        if phase not in NEXT_PHASES[self.phase]:
            raise AssertionError(f"{self.lease_id} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def allocated(self) -> tuple[tuple[str, int], ...]:
        """The resources that the lease takes up now, GPUs included; a blocked one has no CPU."""
        requirements = self.requirements
        items = requirements.without_cpu if self.blocked else requirements.items
        return (*items, (GPU, sum(self.gpus.values()))) if self.gpus else items

    @property
    def charged(self) -> tuple[tuple[str, int], ...]:
        """The resources that count for its account: of background work none, as nobody else has lost them."""
        return () if self.requirements.background else self.allocated

    def has_allocated(self, name: str) -> bool:
        """Return whether ``allocated`` has some of the resource ``name``."""
        return name in self.requirements.names and not (self.blocked and name == CPU)
