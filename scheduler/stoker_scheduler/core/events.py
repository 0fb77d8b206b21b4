"""What happened: the only inputs of the machine. Every event carries its time, ids are given.

Times are seconds of one clock that never runs backwards (the service uses the wall clock, made
monotonic), so that a recorded log replays to the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.nodes import NodeSpec
from stoker_scheduler.core.model.requirements import Need


class Kind(StrEnum):
    """What a leased worker is for; the values are those of the wire."""

    TASK = "task"
    ACTOR = "actor"
    DRIVER = "driver"


class StartFailure(StrEnum):
    """Why a lease did not start. In each case a copy of the order may still be on its way."""

    HERE = "here"
    """The nodelet refused: another node, or another runtime environment, may do better."""
    NODE = "node"
    """The nodelet did not answer, or takes nothing yet: another node may do better."""
    ANYWHERE = "anywhere"
    """No node can do it: the runtime environment cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node registered, perhaps again: with a new incarnation its old leases are lost."""

    at_s: float
    spec: NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """A known node's health, labels or resources changed."""

    at_s: float
    spec: NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node died or left."""

    at_s: float
    node_id: str
    incarnation: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAdopted:
    """A nodelet reports a lease that an earlier scheduler granted."""

    at_s: float
    lease_id: str
    owner_id: str
    job_id: str
    kind: Kind
    node_id: str
    incarnation: int
    need: Need
    gpus: Shares
    granted_at_s: float = 0.0
    blocked: bool = False
    actor_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAsked:
    """An owner wants up to ``count`` leases before ``deadline_s``.

    ``class_key`` is equal for requests whose leases may serve each other (same demand, and for an
    actor the same start of the same actor). ``kernels`` is the kernel set that its work runs, ``setup``
    says what its environment needs installed first.
    """

    at_s: float
    request_id: str
    owner_id: str
    job_id: str
    need: Need
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
class LeaseAskCancelled:
    """The asker went away."""

    at_s: float
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStarted:
    """The nodelet gave the lease a worker."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStartFailed:
    """The nodelet did not, or did not answer."""

    at_s: float
    lease_id: str
    failure: StartFailure
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased:
    """The owner gives leases back, or the gcs ends them."""

    at_s: float
    lease_ids: tuple[str, ...]
    kill: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """The nodelet confirmed a release: what the lease held is free."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBlocked:
    """The worker waits in ``get``: its CPU is free to others."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUnblocked:
    """The worker runs again and takes its CPU back, even if that overcommits the node."""

    at_s: float
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPolled:
    """An owner renews its leases and says which of them it does not use."""

    at_s: float
    owner_id: str
    lease_ids: tuple[str, ...] = ()
    idle_lease_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLost:
    """An owner process ended: its leases are killed and its requests dropped."""

    at_s: float
    owner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """A job is over: so is all that it holds and waits for, but for actors that the gcs owns."""

    at_s: float
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process ended; with it the lease that it served."""

    at_s: float
    lease_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""

    at_s: float


Event = (
    NodeJoined
    | NodeChanged
    | NodeLost
    | LeaseAdopted
    | LeaseAsked
    | LeaseAskCancelled
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
