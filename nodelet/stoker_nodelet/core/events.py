"""Events of the lease machine, its only input: each names something that has happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker_nodelet.core.leases import LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistered:
    """The gcs knows this node under ``incarnation``, and the scheduler of ``epoch`` leads."""

    incarnation: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    """The gcs says that the node is drained; it says so again and again."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFenced:
    """The gcs declared this incarnation over: the work that ran here belongs to nobody."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """The scheduler asked for a worker. ``worker_id`` is used if one must be forked.

    ``env_key`` names the runtime environment; ``applicable_after_fork`` says that a worker that was
    forked without it can still apply it.
    """

    at_s: float
    lease: LeaseTerms
    epoch: int
    env_key: str
    applicable_after_fork: bool
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlesRequested:
    """The scheduler asked to hold bundles, all or none; with ``prepare`` only until they are committed."""

    at_s: float
    leases: tuple[LeaseTerms, ...]
    epoch: int
    prepare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlesCommitted:
    """The scheduler holds all bundles of the gang: those here stay until they are released."""

    lease_ids: tuple[str, ...]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesReleased:
    """The scheduler gave leases back. ``kill`` ends their workers."""

    at_s: float
    lease_ids: tuple[str, ...]
    epoch: int
    kill: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesStopped:
    """The scheduler preempts leases: their workers get notice, and end when ``grace_s`` has passed."""

    at_s: float
    lease_ids: tuple[str, ...]
    epoch: int
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAnswered:
    """The worker has run the callbacks that were to run before its end of this lease: so many."""

    at_s: float
    worker_id: str
    lease_id: str
    callbacks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForked:
    """The process exists. A driver needs no registration: it serves its lease from here on."""

    at_s: float
    worker_id: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """The process could not be made. ``code`` is the code of the error that says so."""

    worker_id: str
    reason: str
    code: str = "worker_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRegistered:
    """The worker registered itself: it is up and listens."""

    at_s: float
    worker_id: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAssigned:
    """The worker accepted the lease."""

    worker_id: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignFailed:
    """The worker did not accept the lease, or did not answer."""

    at_s: float
    worker_id: str
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """The process and all that it started are gone."""

    at_s: float
    worker_id: str
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKillRequested:
    """An operator, the memory monitor or the shell wants the worker to end; ``in_order``: with notice.

    ``saves``: it hosts an actor that saves its state first.
    """

    at_s: float
    worker_id: str
    reason: str
    in_order: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpent:
    """The worker takes no more calls (``max_calls``): it leaves when its lease ends."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksRegistered:
    """The worker's code has something to save before its end: it gets notice, whatever ends it in order."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireAnswered:
    """The worker leaves, or stays because others need objects that it owns.

    ``uses_gpus``: it stays and cannot let go of its GPUs: it runs a call or has opened a device.
    """

    at_s: float
    worker_id: str
    leaves: bool
    uses_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """The job ended: nothing of it may run any more, except actors (the gcs ends those that must)."""

    at_s: float
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """Measurement of one GPU.

    ``processes`` maps a pid to the bytes that it has allocated there. ``xids`` are the driver's errors
    since the last reading, ``ecc_errors`` a count of uncorrectable ones, ``lost`` why it does not answer.
    None is what could not be measured.
    """

    processes: Mapping[int, int] | None = field(default_factory=dict)
    xids: tuple[int, ...] = ()
    ecc_errors: int | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRead:
    """GPUs were measured, from ``at_s`` on; one that could not be is left out."""

    at_s: float
    readings: Mapping[int, GpuReading]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReleased:
    """An operator put a quarantined GPU back to use."""

    at_s: float
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt of the job ended: nothing of it may run any more, and what comes is of the next one."""

    at_s: float
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeleted:
    """The job is gone: one of the same id is another."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed. ``worker_ids`` are for warm workers that may be forked."""

    at_s: float
    worker_ids: tuple[str, ...] = ()


Event = (
    NodeRegistered
    | NodeDrained
    | NodeFenced
    | LeaseRequested
    | BundlesRequested
    | BundlesCommitted
    | LeasesReleased
    | LeasesStopped
    | StopAnswered
    | WorkerForked
    | ForkFailed
    | WorkerRegistered
    | WorkerAssigned
    | AssignFailed
    | WorkerExited
    | WorkerKillRequested
    | WorkerSpent
    | CallbacksRegistered
    | RetireAnswered
    | JobFinished
    | GpusRead
    | GpuReleased
    | AttemptEnded
    | JobDeleted
    | Ticked
)
