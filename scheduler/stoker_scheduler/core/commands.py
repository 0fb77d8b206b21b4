"""Commands: the only outputs of the state machine, from ``step`` to the engine.

The engine (or a simulation) carries them out in order and reports their outcome as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker_scheduler.core.model.devices import Shares


class RejectReason(StrEnum):
    """The reason for which a request is rejected for good."""

    INFEASIBLE = "infeasible"
    START_FAILED = "start_failed"
    JOB_FINISHED = "job_finished"
    OWNER_LOST = "owner_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Order to have the nodelet give the lease a worker; answered by LeaseStarted or LeaseStartFailed."""

    lease_id: str
    request_id: str
    node_id: str
    gpus: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Order to have the nodelet end the lease, repeated until it confirms; answered by LeaseEnded."""

    lease_id: str
    node_id: str
    kill: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a request; ``lease_ids`` is empty when its wait has passed."""

    request_id: str
    lease_ids: tuple[str, ...]
    queue_position: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Answer to a request that is an error."""

    request_id: str
    reason: RejectReason
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Demand that an owner finish what runs on the leases and give them back."""

    owner_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Notice to an owner that leases are gone."""

    owner_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Order to send a Tick at this time, if not before."""

    at_s: float


Command = StartWorker | ReleaseLease | Reply | Reject | Preempt | Lost | WakeAt

Outbox = list[Command]
"""The commands of one step so far. Whatever decides something appends to it what follows."""
