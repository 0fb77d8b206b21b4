"""Commands: the only outputs of the state machine, from ``step`` to the engine.

The engine (or a simulation) carries them out in order and reports their outcome as events.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.requirements import Requirements


class RejectReason(StrEnum):
    """The reason for which a request is rejected for good."""

    INFEASIBLE = "infeasible"
    START_FAILED = "start_failed"
    JOB_FINISHED = "job_finished"
    OWNER_LOST = "owner_lost"
    GROUP_REMOVED = "group_removed"


class StartWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the nodelet give the lease a worker; answered by LeaseStarted or LeaseStartFailed."""

    lease_id: str
    request_id: str
    node_id: str
    gpus: Shares


class HoldBundles(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the nodelet hold bundles; answered by BundlesHeld, or LeaseStartFailed for each.

    With ``prepare`` it gives them up unless CommitBundles follows soon.
    """

    lease_ids: tuple[str, ...]
    node_id: str
    prepare: bool


class CommitBundles(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the nodelet keep prepared bundles; answered by BundlesCommitted, or BundlesLost."""

    lease_ids: tuple[str, ...]
    node_id: str


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the nodelet end the lease, repeated until it confirms; answered by LeaseEnded."""

    lease_id: str
    node_id: str
    kill: bool
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request; ``lease_ids`` is empty when its wait has passed."""

    request_id: str
    lease_ids: tuple[str, ...]
    queue_position: int = 0
    note: str = ""


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request that is an error."""

    request_id: str
    reason: RejectReason
    text: str


class Preempt(msgspec.Struct, frozen=True, kw_only=True):
    """Demand that an owner finish what runs on the leases and give them back."""

    owner_id: str
    lease_ids: tuple[str, ...]


class StopLease(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the nodelet end the lease's worker in ``grace_s``, with notice; nothing answers it."""

    lease_id: str
    node_id: str
    grace_s: float
    reason: str


class PreemptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Order to have the gcs ask for all bundles of a group again; the lease holds one that it has."""

    group_id: str
    lease_id: str
    reason: str


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Notice to an owner that leases are gone."""

    owner_id: str
    lease_ids: tuple[str, ...]


class AskExtenders(msgspec.Struct, frozen=True, kw_only=True):
    """Order to ask the extenders that the requirements name about the nodes for them."""

    requirements: Requirements


class WakeAt(msgspec.Struct, frozen=True, kw_only=True):
    """Order to send a Tick at this time, if not before."""

    at_s: float


Command = (
    StartWorker
    | HoldBundles
    | CommitBundles
    | ReleaseLease
    | Reply
    | Reject
    | Preempt
    | StopLease
    | PreemptGroup
    | Lost
    | AskExtenders
    | WakeAt
)

Outbox = list[Command]
"""The commands of one step so far. Whatever decides something appends to it what follows."""
