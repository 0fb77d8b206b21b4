"""The part of a lease that the lease machine decides from.

The scheduler owns leases, and terms never change while one is held: the shell translates the wire's lease
once, and keeps the rest of it, so that the core knows no type of the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class WorkKind(StrEnum):
    """The use of a leased worker."""

    TASK = "task"
    ACTOR = "actor"
    DRIVER = "driver"
    BUNDLE = "bundle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The owner of a lease and what it takes; ``gpus`` maps a device index to the fraction held."""

    lease_id: str
    job_id: str
    kind: WorkKind
    node_incarnation: int
    gpus: dict[int, float] = field(default_factory=dict)
    actor_id: str = ""
