"""Events: the only inputs of the state machine. Every event carries its time, ids are given.

Times are seconds of one clock that never runs backwards (the service uses the wall clock, made
monotonic), so that a recorded log replays to the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.extenders import ExtenderAnswer
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.nodes import NodeSpec
from stoker_scheduler.core.model.queues import DEFAULT_QUEUE, QueueSpec
from stoker_scheduler.core.model.requirements import ANY_BUNDLE, Requirements


class Kind(StrEnum):
    """The purpose of a lease's worker; the values are those of the wire."""

    TASK = "task"
    ACTOR = "actor"
    DRIVER = "driver"
    BUNDLE = "bundle"
    """No worker: the lease holds resources, for the leases of a placement group."""


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
class RankSlow:
    """The report that a rank, which ``rank`` names among those of all jobs, is slow on its node."""

    at_s: float
    node_id: str
    rank: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendersAnswered:
    """The answer of the extenders about the nodes for requirements; theirs, or what stands in for it."""

    at_s: float
    requirements: Requirements
    answer: ExtenderAnswer


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
    group_id: str = ""
    bundle: int = ANY_BUNDLE
    user: str = ""
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    preemptible: bool = False
    preemption_grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesChanged:
    """The queues that there are from now on."""

    at_s: float
    queues: tuple[QueueSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdded:
    """A placement group that the gcs has; with its bundles, or some, still to be requested."""

    at_s: float
    group_id: str
    job_id: str
    gang: Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRemoved:
    """The end of a placement group: its bundles are released, and what is in them is killed."""

    at_s: float
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """An owner's request for up to ``count`` leases before ``deadline_s``.

    ``class_key`` is equal for requests whose leases may serve each other (same demand, and for an
    actor the same start of the same actor). ``kernels`` is the kernel set that its work runs, ``setup``
    says what its environment needs installed first. A :class:`Gang` is requested once, of kind BUNDLE:
    bundle i of it is number ``indices[i]`` of the placement group. It waits in ``queue``, for a job of
    ``user``. Its leases may be ended while they are in use if it is ``preemptible``.
    """

    at_s: float
    request_id: str
    owner_id: str
    job_id: str
    requirements: Requirements | Gang
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
    group_id: str = ""
    indices: tuple[int, ...] = ()
    user: str = ""
    queue: str = DEFAULT_QUEUE
    preemptible: bool = False
    preemption_grace_s: float | None = None

    @property
    def belongs_to(self) -> tuple[str, str, str]:
        """Its owner, job and placement group, whose end is its end."""
        requirements = self.requirements
        inside = "" if isinstance(requirements, Gang) else requirements.group_id
        return self.owner_id, self.job_id, self.group_id or inside


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
class BundlesHeld:
    """The nodelet holds the bundles; those that it only prepared, for a while."""

    at_s: float
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlesCommitted:
    """The nodelet keeps the bundles until they are released."""

    at_s: float
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlesLost:
    """The nodelet gave the bundles up before they were committed."""

    at_s: float
    lease_ids: tuple[str, ...]


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
class JobAdded:
    """A new job; its id may be that of one that ended and was deleted."""

    at_s: float
    job_id: str


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
    | RankSlow
    | ExtendersAnswered
    | LeaseAdopted
    | QueuesChanged
    | GroupAdded
    | GroupRemoved
    | LeaseRequested
    | LeaseRequestCancelled
    | LeaseStarted
    | BundlesHeld
    | BundlesCommitted
    | BundlesLost
    | LeaseStartFailed
    | LeaseReleased
    | LeaseEnded
    | LeaseBlocked
    | LeaseUnblocked
    | OwnerPolled
    | OwnerLost
    | JobAdded
    | JobFinished
    | WorkerExited
    | Tick
)
