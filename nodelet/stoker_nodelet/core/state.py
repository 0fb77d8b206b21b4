"""What the lease machine knows: workers, leases, what ended, and the invariants between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stoker_wire.messages.cluster import Lease, LeaseKind, WorkerState
from stoker_wire.messages.common import Address

GPU_SLACK = 1e-6  # fractions such as 1/3 add up to a little more than 1
_REMEMBERED = 10_000


class WorkerPhase(StrEnum):
    """STARTING -> IDLE <-> LEASED -> RETIRING <-> IDLE; every phase -> DYING."""

    STARTING = "STARTING"
    """Forked, not registered yet; may have its lease already."""
    IDLE = "IDLE"
    LEASED = "LEASED"
    RETIRING = "RETIRING"
    """Asked to leave; it refuses while others need what it owns."""
    DYING = "DYING"
    """Told to die; it still holds its devices until its exit."""

    @property
    def reported(self) -> WorkerState:
        """The phase as other components see it."""
        return _REPORTED[self]


_REPORTED = {
    WorkerPhase.STARTING: WorkerState.STARTING,
    WorkerPhase.IDLE: WorkerState.IDLE,
    WorkerPhase.LEASED: WorkerState.LEASED,
    WorkerPhase.RETIRING: WorkerState.IDLE,
    WorkerPhase.DYING: WorkerState.DEAD,
}


class LeasePhase(StrEnum):
    """PARKED -> STARTING -> READY; a lease that ends leaves the state."""

    PARKED = "PARKED"
    """Its devices are still held by a dying worker."""
    STARTING = "STARTING"
    READY = "READY"


@dataclass(slots=True)
class Worker:
    """One process. ``job_id`` is empty while no job has used it (then it is *fresh*)."""

    worker_id: str
    phase: WorkerPhase
    since_s: float
    started_at_s: float
    kind: LeaseKind = LeaseKind.TASK
    job_id: str = ""
    env_key: str = ""
    lease_id: str = ""
    actor_id: str = ""
    gpus: dict[int, float] = field(default_factory=dict)
    pid: int = 0
    address: Address | None = None
    reason: str = ""
    spent: bool = False
    """It serves nobody again, and leaves when nobody needs what it owns."""
    asked: int = 0
    """How often it was asked to leave and stayed."""

    @property
    def fresh(self) -> bool:
        """Whether no job's code has run in it."""
        return self.job_id == ""


@dataclass(slots=True)
class HeldLease:
    """A lease on this node, and the worker that serves it (none while it is parked)."""

    lease: Lease
    phase: LeasePhase
    env_key: str
    adoptable: bool
    next_worker_id: str
    worker_id: str = ""
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """How long things may take, in seconds, and how many fresh workers wait for a first call."""

    worker_idle_s: float = 60.0
    worker_start_s: float = 60.0
    worker_end_s: float = 5.0
    spent_ask_s: float = 0.5
    """A spent worker is asked to leave after this, then after twice as long, ..."""
    spent_ask_max_s: float = 30.0
    warm_workers: int = 1


@dataclass(slots=True)
class State:
    """Everything the machine decides from."""

    incarnation: int = 0
    epoch: int = 0
    policy: Policy = Policy()
    workers: dict[str, Worker] = field(default_factory=dict)
    leases: dict[str, HeldLease] = field(default_factory=dict)
    ended: dict[str, None] = field(default_factory=dict)
    finished_jobs: dict[str, None] = field(default_factory=dict)

    def gpu_use(self, *, with_dying: bool = True) -> dict[int, float]:
        """Return device index -> the fraction that workers hold, also those that end soon."""
        use: dict[int, float] = {}
        for worker in self.workers.values():
            if with_dying or worker.phase not in (WorkerPhase.DYING, WorkerPhase.RETIRING):
                for index, share in worker.gpus.items():
                    use[index] = use.get(index, 0.0) + share
        return use

    def violations(self) -> list[str]:
        """Return what is inconsistent; tests call this after every event."""
        found = [
            f"GPU {index} is held {share} times"
            for index, share in self.gpu_use().items()
            if share > 1.0 + GPU_SLACK
        ]
        for lease_id, held in self.leases.items():
            worker = self.workers.get(held.worker_id)
            if held.phase is LeasePhase.PARKED:
                if held.worker_id:
                    found.append(f"{lease_id} is parked and has {held.worker_id}")
            elif worker is None or worker.lease_id != lease_id:
                found.append(f"{lease_id} names {held.worker_id}, which does not serve it")
            elif worker.phase not in (WorkerPhase.STARTING, WorkerPhase.LEASED):
                found.append(f"{lease_id} is served by a worker that is {worker.phase}")
            elif held.phase is LeasePhase.READY and worker.phase is not WorkerPhase.LEASED:
                found.append(f"{lease_id} is ready but its worker is {worker.phase}")
        for worker in self.workers.values():
            serving = worker.phase is not WorkerPhase.DYING and worker.lease_id
            if serving and worker.lease_id not in self.leases:
                found.append(f"{worker.worker_id} serves {worker.lease_id}, which is unknown")
            if worker.phase is WorkerPhase.LEASED and not worker.lease_id:
                found.append(f"{worker.worker_id} is leased to nobody")
            if worker.phase is WorkerPhase.IDLE and (worker.gpus or worker.lease_id):
                found.append(f"{worker.worker_id} is idle and holds something")
        found.extend(f"{one} is held and ended" for one in self.leases if one in self.ended)
        return found


def remember(memory: dict[str, None], key: str) -> None:
    """Keep ``key`` among the last few thousand."""
    memory[key] = None
    if len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]
