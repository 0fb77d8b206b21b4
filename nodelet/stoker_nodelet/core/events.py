"""Events of the lease machine, its only input: each names something that has happened."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_nodelet.core.leases import LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistered:
    """The gcs knows this node under ``incarnation``."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFenced:
    """The gcs declared this incarnation over: the work that ran here belongs to nobody."""


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
class LeasesReleased:
    """The scheduler gave leases back. ``kill`` ends their workers."""

    at_s: float
    lease_ids: tuple[str, ...]
    epoch: int
    kill: bool = False
    reason: str = ""


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
    """An operator, the OOM guard or the shell asked for the end of the worker."""

    at_s: float
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpent:
    """The worker takes no more calls (``max_calls``): it leaves when its lease ends."""

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
class Ticked:
    """Time passed. ``worker_ids`` are for warm workers that may be forked."""

    at_s: float
    worker_ids: tuple[str, ...] = ()


Event = (
    NodeRegistered
    | NodeFenced
    | LeaseRequested
    | LeasesReleased
    | WorkerForked
    | ForkFailed
    | WorkerRegistered
    | WorkerAssigned
    | AssignFailed
    | WorkerExited
    | WorkerKillRequested
    | WorkerSpent
    | RetireAnswered
    | JobFinished
    | Ticked
)
