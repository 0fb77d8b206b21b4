"""One lease in the state: its phase, who has it, and what it has allocated.

The phases and their order are here alone; ``lifecycle`` makes the moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import CPU


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
    account: str
    job_id: str
    kind: Kind
    node_id: str
    incarnation: int
    requirements: Requirements
    gpus: Shares
    class_key: str
    priority: int
    granted_at_s: float
    phase: Phase = Phase.STARTING
    request_id: str = ""
    expires_at_s: float | None = None
    blocked: bool = False
    idle: bool = False
    preempted: bool = False
    kill: bool = False
    actor_id: str = ""
    name: str = ""

    def move(self, phase: Phase) -> None:
        """Go to the next phase; a move that the table lacks is a bug."""
        if phase not in NEXT_PHASES[self.phase]:
            raise AssertionError(f"{self.lease_id} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def allocated(self) -> tuple[tuple[str, int], ...]:
        """The resources that the lease takes up now, GPUs included; a blocked one has no CPU."""
        if not self.blocked:
            return self.requirements.vector
        return tuple((n, u) for n, u in self.requirements.vector if n != CPU)

    def has_allocated(self, name: str) -> bool:
        """Return whether ``allocated`` has some of the resource ``name``."""
        return name in self.requirements.names and not (self.blocked and name == CPU)
