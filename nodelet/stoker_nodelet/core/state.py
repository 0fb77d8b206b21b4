"""State of the lease machine: workers, leases, ended ones, and the invariants between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stoker_nodelet.core.leases import LeaseTerms, WorkKind

GPU_SLACK = 1e-6  # fractions such as 1/3 add up to a little more than 1
_REMEMBERED = 10_000


class WorkerPhase(StrEnum):
    """STARTING -> IDLE <-> LEASED -> RETIRING <-> IDLE; every phase -> TERMINATING."""

    STARTING = "STARTING"
    """Forked, not registered yet; may have its lease already."""
    IDLE = "IDLE"
    LEASED = "LEASED"
    RETIRING = "RETIRING"
    """Asked to leave; it refuses while others need what it owns."""
    TERMINATING = "DYING"
    """To end now; it holds its devices until its exit."""


class LeasePhase(StrEnum):
    """AWAITING_DEVICES -> STARTING -> READY; a lease that ends leaves the state."""

    AWAITING_DEVICES = "AWAITING_DEVICES"
    """A worker that ends still holds its devices."""
    STARTING = "STARTING"
    READY = "READY"


@dataclass(slots=True)
class WorkerEntry:
    """One process. ``job_id`` is empty while no job has used it (then it is *fresh*)."""

    worker_id: str
    phase: WorkerPhase
    since_s: float
    started_at_s: float
    kind: WorkKind = WorkKind.TASK
    job_id: str = ""
    env_key: str = ""
    lease_id: str = ""
    actor_id: str = ""
    gpus: dict[int, float] = field(default_factory=dict)
    pid: int = 0
    reason: str = ""
    spent: bool = False
    """It serves nobody again, and leaves when nobody needs what it owns."""
    refused_to_retire: int = 0
    """How often it was asked to leave and stayed."""

    @property
    def fresh(self) -> bool:
        """Return whether no job's code has run in it."""
        return self.job_id == ""


@dataclass(slots=True)
class LeaseEntry:
    """A lease on this node, and the worker that serves it (none while it awaits devices)."""

    terms: LeaseTerms
    phase: LeasePhase
    env_key: str
    applicable_after_fork: bool
    next_worker_id: str
    worker_id: str = ""
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """Time limits in seconds, and how many fresh workers wait for a first call."""

    worker_idle_s: float = 60.0
    worker_start_s: float = 60.0
    worker_end_s: float = 5.0
    spent_retire_s: float = 0.5
    """A spent worker is asked to leave after this, then after twice as long, ..."""
    spent_retire_max_s: float = 30.0
    warm_workers: int = 1


@dataclass(slots=True)
class State:
    """Everything that the machine decides from."""

    incarnation: int = 0
    epoch: int = 0
    policy: Policy = Policy()
    workers: dict[str, WorkerEntry] = field(default_factory=dict)
    leases: dict[str, LeaseEntry] = field(default_factory=dict)
    ended_leases: dict[str, None] = field(default_factory=dict)
    finished_jobs: dict[str, None] = field(default_factory=dict)

    def gpu_use(self, *, with_ending: bool = True) -> dict[int, float]:
        """Return device index -> the fraction that workers hold, also those that end soon."""
        use: dict[int, float] = {}
        for worker in self.workers.values():
            if with_ending or worker.phase not in (WorkerPhase.TERMINATING, WorkerPhase.RETIRING):
                for index, share in worker.gpus.items():
                    use[index] = use.get(index, 0.0) + share
        return use

    def violations(self) -> list[str]:
        """Return the broken invariants as sentences; tests call this after every event."""
        broken = [
            f"GPU {index} is held {share} times"
            for index, share in self.gpu_use().items()
            if share > 1.0 + GPU_SLACK
        ]
        for lease_id, lease in self.leases.items():
            worker = self.workers.get(lease.worker_id)
            if lease.phase is LeasePhase.AWAITING_DEVICES:
                if lease.worker_id:
                    broken.append(f"{lease_id} awaits devices and has {lease.worker_id}")
            elif worker is None or worker.lease_id != lease_id:
                broken.append(f"{lease_id} names {lease.worker_id}, which does not serve it")
            elif worker.phase not in (WorkerPhase.STARTING, WorkerPhase.LEASED):
                broken.append(f"{lease_id} is served by a worker that is {worker.phase}")
            elif lease.phase is LeasePhase.READY and worker.phase is not WorkerPhase.LEASED:
                broken.append(f"{lease_id} is ready but its worker is {worker.phase}")
        for worker in self.workers.values():
            serving = worker.phase is not WorkerPhase.TERMINATING and worker.lease_id
            if serving and worker.lease_id not in self.leases:
                broken.append(f"{worker.worker_id} serves {worker.lease_id}, which is unknown")
            if worker.phase is WorkerPhase.LEASED and not worker.lease_id:
                broken.append(f"{worker.worker_id} is leased to nobody")
            if worker.phase is WorkerPhase.IDLE and (worker.gpus or worker.lease_id):
                broken.append(f"{worker.worker_id} is idle and holds something")
        broken.extend(f"{one} is held and ended" for one in self.leases if one in self.ended_leases)
        return broken


def remember(recent: dict[str, None], key: str) -> None:
    """Keep ``key`` among the last few thousand."""
    recent[key] = None
    if len(recent) > _REMEMBERED:
        del recent[next(iter(recent))]
