"""What is to be done: the only outputs of the machine. The service carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker_scheduler.core.model.devices import Shares


class Refusal(StrEnum):
    """Why a request is refused for good."""

    INFEASIBLE = "infeasible"
    START_FAILED = "start_failed"
    JOB_FINISHED = "job_finished"
    OWNER_LOST = "owner_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLease:
    """Have the nodelet give the lease a worker; report LeaseStarted or LeaseStartFailed."""

    lease_id: str
    request_id: str
    node_id: str
    gpus: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Have the nodelet end the lease, again and again until it confirms; report LeaseEnded."""

    lease_id: str
    node_id: str
    kill: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a request; ``lease_ids`` is empty when its wait has passed."""

    request_id: str
    lease_ids: tuple[str, ...]
    queue_position: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Answer a request with an error."""

    request_id: str
    refusal: Refusal
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Ask an owner to finish what runs on the leases and to give them back."""

    owner_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Tell an owner that leases are gone."""

    owner_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Tick at this time, if not before."""

    at_s: float


Command = StartLease | ReleaseLease | Reply | Reject | Recall | Lost | WakeAt
