"""Events: the only inputs of the state machine. Every event carries its time, ids are given.

Times are seconds of one clock that never runs backwards (the service uses the wall clock, made
monotonic), so that a recorded log replays to the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

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


class _Timed(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its time; a Struct is made several times faster than a frozen dataclass."""

    at_s: float


class NodeJoined(_Timed, frozen=True, kw_only=True):
    """A registration of a node; under a new incarnation its old leases are lost."""

    spec: NodeSpec


class NodeChanged(_Timed, frozen=True, kw_only=True):
    """A change of a known node's health, labels, resources or compiled kernels."""

    spec: NodeSpec


class NodeLost(_Timed, frozen=True, kw_only=True):
    """The death or departure of a node."""

    node_id: str
    incarnation: int = 0
    reason: str = ""


class RankSlow(_Timed, frozen=True, kw_only=True):
    """The report that a rank, which ``rank`` names among those of all jobs, is slow on its node."""

    node_id: str
    rank: str


class ExtendersAnswered(_Timed, frozen=True, kw_only=True):
    """The answer of the extenders about the nodes for requirements; theirs, or what stands in for it."""

    requirements: Requirements
    answer: ExtenderAnswer


class LeaseAdopted(_Timed, frozen=True, kw_only=True):
    """A nodelet's report of a lease that an earlier scheduler granted."""

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
    owner_node_id: str = ""


class QueuesChanged(_Timed, frozen=True, kw_only=True):
    """The queues that there are from now on."""

    queues: tuple[QueueSpec, ...]


class GroupAdded(_Timed, frozen=True, kw_only=True):
    """A placement group that the gcs has; with its bundles, or some, still to be requested."""

    group_id: str
    job_id: str
    gang: Gang


class GroupShrunk(_Timed, frozen=True, kw_only=True):
    """Bundles that a placement group has given up for good: released, and what is in them is killed."""

    group_id: str
    bundles: tuple[int, ...]


class GroupRemoved(_Timed, frozen=True, kw_only=True):
    """The end of a placement group: its bundles are released, and what is in them is killed."""

    group_id: str


class LeaseRequested(_Timed, frozen=True, kw_only=True):
    """An owner's request for up to ``count`` leases before ``deadline_s``.

    ``class_key`` is equal for requests whose leases may serve each other (same demand, and for an
    actor the same start of the same actor). ``kernels`` is the kernel set that its work runs, ``setup``
    says what its environment needs installed first. A :class:`Gang` is requested once, of kind BUNDLE:
    bundle i of it is number ``indices[i]`` of the placement group. It waits in ``queue``, for a job of
    ``user``. Its leases may be ended while they are in use if it is ``preemptible``.
    """

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
    locality: Mapping[str, int] = msgspec.field(default_factory=dict)
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
    owner_node_id: str = ""
    """The node whose end is its owner's; none for a driver, which ends with its job."""

    @property
    def belongs_to(self) -> tuple[str, ...]:
        """Its owner, job, placement group and its owner's node, whose end is its end."""
        requirements = self.requirements
        inside = "" if isinstance(requirements, Gang) else requirements.group_id
        return self.owner_id, self.job_id, self.group_id or inside, self.owner_node_id


class LeaseRequestCancelled(_Timed, frozen=True, kw_only=True):
    """The end of a request whose caller went away."""

    request_id: str


class LeaseStarted(_Timed, frozen=True, kw_only=True):
    """The lease has a worker."""

    lease_id: str


class BundlesHeld(_Timed, frozen=True, kw_only=True):
    """The nodelet holds the bundles; those that it only prepared, for a while."""

    lease_ids: tuple[str, ...]


class BundlesCommitted(_Timed, frozen=True, kw_only=True):
    """The nodelet keeps the bundles until they are released."""

    lease_ids: tuple[str, ...]


class BundlesLost(_Timed, frozen=True, kw_only=True):
    """The nodelet gave the bundles up before they were committed."""

    lease_ids: tuple[str, ...]


class LeaseStartFailed(_Timed, frozen=True, kw_only=True):
    """The nodelet gave the lease no worker, or did not answer."""

    lease_id: str
    failure: StartFailure
    text: str = ""


class LeaseReleased(_Timed, frozen=True, kw_only=True):
    """The return of leases by their owner, or their end by the gcs."""

    lease_ids: tuple[str, ...]
    kill: bool = False
    reason: str = ""


class LeaseEnded(_Timed, frozen=True, kw_only=True):
    """The nodelet's confirmation of a release: the lease's resources are free."""

    lease_id: str


class LeaseBlocked(_Timed, frozen=True, kw_only=True):
    """The worker waits in ``get``: its CPU is free to others."""

    lease_id: str


class LeaseUnblocked(_Timed, frozen=True, kw_only=True):
    """The worker runs again and has its CPU back, even if that overcommits the node."""

    lease_id: str


class OwnerPolled(_Timed, frozen=True, kw_only=True):
    """An owner's list of all leases that it has, some of which it does not use."""

    owner_id: str
    lease_ids: tuple[str, ...] = ()
    idle_lease_ids: tuple[str, ...] = ()


class OwnerLost(_Timed, frozen=True, kw_only=True):
    """The end of an owner process: its leases are killed and its requests rejected."""

    owner_id: str


class JobAdded(_Timed, frozen=True, kw_only=True):
    """A new job; its id may be that of one that ended and was deleted."""

    job_id: str


class JobFinished(_Timed, frozen=True, kw_only=True):
    """The end of a job, with all that it has and waits for, but for actors that the gcs owns."""

    job_id: str


class WorkerExited(_Timed, frozen=True, kw_only=True):
    """The end of a worker process, and with it of the lease that it served."""

    lease_id: str
    reason: str = ""


class Tick(_Timed, frozen=True, kw_only=True):
    """The time passes: timers may be due."""


Event = (
    NodeJoined
    | NodeChanged
    | NodeLost
    | RankSlow
    | ExtendersAnswered
    | LeaseAdopted
    | QueuesChanged
    | GroupAdded
    | GroupShrunk
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
