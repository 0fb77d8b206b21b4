"""Events: the only inputs of the state machine. Every event carries its time, ids are given.

Times are seconds of one clock that never runs backwards (the service uses the wall clock, made
monotonic), so that a recorded log replays to the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.nodes import NodeSpec
from stoker_scheduler.core.model.requirements import Requirements


class Kind(StrEnum):
    """The purpose of a leased worker; the values are those of the wire."""

    TASK = "task"
    ACTOR = "actor"
    DRIVER = "driver"


class StartFailure(StrEnum):
    """The scope of a failed start. In each case a copy of the order may still be on its way."""

    HERE = "here"
    """The nodelet refused: another node, or another runtime environment, may do better."""
    NODE = "node"
    """The nodelet did not answer, or takes nothing yet: another node may do better."""
    ANYWHERE = "anywhere"
    """No node can do it: the runtime environment cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A registration of a node; under a new incarnation its old leases are lost."""

    at_s: float
    spec: NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """A change of a known node's health, labels, resources or compiled kernels."""

    at_s: float
    spec: NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The death or departure of a node."""

    at_s: float
    node_id: str
    incarnation: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAdopted:
    """A nodelet's report of a lease that an earlier scheduler granted."""

    at_s: float
    lease_id: str
    owner_id: str
    job_id: str
    kind: Kind
    node_id: str
    incarnation: int
    requirements: Requirements
    gpus: Shares
    granted_at_s: float = 0.0
    blocked: bool = False
    actor_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """An owner's request for up to ``count`` leases before ``deadline_s``.

    ``class_key`` is equal for requests whose leases may serve each other (same demand, and for an
    actor the same start of the same actor). ``kernels`` is the kernel set that its work runs, ``setup``
    says what its environment needs installed first.
    """

    at_s: float
    request_id: str
    owner_id: str
    job_id: str
    requirements: Requirements
    class_key: str
    count: int
    deadline_s: float
    kind: Kind = Kind.TASK
    priority: int = 0
    wait_if_infeasible: bool = False
    locality: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    actor_id: str = ""
    kernels: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequestCancelled:
    """The end of a request whose caller went away."""

    at_s: float
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStarted:
    """The lease has a worker."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStartFailed:
    """The nodelet gave the lease no worker, or did not answer."""

    at_s: float
    lease_id: str
    failure: StartFailure
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased:
    """The return of leases by their owner, or their end by the gcs."""

    at_s: float
    lease_ids: tuple[str, ...]
    kill: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """The nodelet's confirmation of a release: the lease's resources are free."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBlocked:
    """The worker waits in ``get``: its CPU is free to others."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUnblocked:
    """The worker runs again and has its CPU back, even if that overcommits the node."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPolled:
    """An owner's renewal of its leases, some of which it does not use."""

    at_s: float
    owner_id: str
    lease_ids: tuple[str, ...] = ()
    idle_lease_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLost:
    """The end of an owner process: its leases are killed and its requests rejected."""

    at_s: float
    owner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """The end of a job, with all that it has and waits for, but for actors that the gcs owns."""

    at_s: float
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """The end of a worker process, and with it of the lease that it served."""

    at_s: float
    lease_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time passes: timers may be due."""

    at_s: float


Event = (
    NodeJoined
    | NodeChanged
    | NodeLost
    | LeaseAdopted
    | LeaseRequested
    | LeaseRequestCancelled
    | LeaseStarted
    | LeaseStartFailed
    | LeaseReleased
    | LeaseEnded
    | LeaseBlocked
    | LeaseUnblocked
    | OwnerPolled
    | OwnerLost
    | JobFinished
    | WorkerExited
    | Tick
)
