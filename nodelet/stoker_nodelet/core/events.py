"""What the lease machine is told (past tense) and what it asks for (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_wire.messages.cluster import Lease
from stoker_wire.messages.common import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistered:
    """The gcs knows this node under ``incarnation``."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFenced:
    """The gcs gave this node up: what it ran belongs to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """The scheduler wants a worker. ``worker_id`` is used if one must be forked.

    ``env_key`` names the runtime environment; ``adoptable`` says that a fresh worker can still
    take it on.
    """

    at_s: float
    lease: Lease
    epoch: int
    env_key: str
    adoptable: bool
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesReleased:
    """The scheduler gives leases back. ``kill`` ends their workers."""

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
    """The process could not be made. ``code`` is that of the error which says so."""

    worker_id: str
    reason: str
    code: str = "worker_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRegistered:
    """The worker is up and listens."""

    at_s: float
    worker_id: str
    pid: int
    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAssigned:
    """The worker took the lease on."""

    worker_id: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignFailed:
    """The worker did not take the lease on. ``worker_id`` of another one may be forked."""

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
class WorkerCondemned:
    """Somebody wants the worker dead: an operator, the memory guard."""

    at_s: float
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpent:
    """The worker takes no more calls (``max_calls``): it leaves when its lease ends."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireAnswered:
    """The worker leaves, or stays because others need what it owns.

    ``uses_gpus``: it stays and cannot let go of its GPUs: it runs a call or has opened a device.
    """

    at_s: float
    worker_id: str
    leaves: bool
    uses_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """Nothing of the job shall run any more, except detached actors (the gcs ends the others)."""

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
    | WorkerCondemned
    | WorkerSpent
    | RetireAnswered
    | JobFinished
    | Ticked
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker:
    """Fork a worker; ``lease_id`` is empty for a warm one."""

    worker_id: str
    lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignWorker:
    """Tell a registered worker which lease it serves; answer WorkerAssigned or AssignFailed."""

    worker_id: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End the worker and its descendants; a driver is asked to leave first."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireWorker:
    """Ask the worker to leave; answer RetireAnswered."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLease:
    """The lease has its worker: answer who waits for it."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLease:
    """The lease does not get a worker: answer with the error of ``code``."""

    lease_id: str
    code: str
    message: str


Command = ForkWorker | AssignWorker | KillWorker | RetireWorker | AnnounceLease | RefuseLease
