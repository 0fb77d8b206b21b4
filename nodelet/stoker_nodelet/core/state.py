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


class Rung(StrEnum):
    """NOTICE -> TERM -> KILL: the ladder that leads to the end of a worker, from any rung on."""

    NOTICE = "NOTICE"
    """It knows, and may finish or save its work."""
    TERM = "TERM"
    """It has been sent SIGTERM, or leaves because it was asked to."""
    KILL = "KILL"
    """It has been sent SIGKILL."""


@dataclass(slots=True)
class Stop:
    """A worker's way to its end: the rung that it is on. Only the core's time takes it further."""

    rung: Rung
    until_s: float
    """When the next rung is due."""
    preempted: bool = False


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
    stop: Stop | None = None
    has_callbacks: bool = False
    """Whether the code of its lease wants notice of its end."""
    saves: bool = False
    """Whether a notice has an actor save its state: nobody has taken its place yet."""
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


@dataclass(slots=True)
class BundleEntry:
    """Resources that are held for a placement group, by a lease without a worker."""

    lease_id: str
    job_id: str
    prepared_at_s: float | None
    """None once it is committed."""


@dataclass(slots=True)
class GpuEntry:
    """A GPU that can be measured."""

    residents: frozenset[int] | None = None
    """Pids of others that used it before any lease, and do not count; None until it was measured."""
    pids: frozenset[int] = frozenset()
    """Those of the last measurement."""
    ecc_errors: int | None = None
    left_at_s: float | None = None
    """The end of its last worker, while its memory is not known to be free."""
    held: str = ""
    """The memory that is still allocated since, in words."""
    quarantine: str = ""
    """The reason why no lease gets it; empty while it is in use."""
    is_faulty: bool = False
    """It is quarantined for an error of its own: it does not come back by itself."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Time limits in seconds, and how many fresh workers wait for a first call."""

    worker_idle_s: float = 60.0
    worker_start_s: float = 60.0
    worker_end_s: float = 5.0
    """A worker that was sent SIGKILL and is still there after this is sent it again."""
    notice_grace_s: float = 5.0
    """How long a worker that wants notice has from it to SIGTERM, where it is not preempted."""
    term_grace_s: float = 3.0
    """How long a worker may take to end itself after SIGTERM."""
    spent_retire_s: float = 0.5
    """A spent worker is asked to leave after this, then after twice as long, ..."""
    spent_retire_max_s: float = 30.0
    prepared_ttl_s: float = 30.0
    """A bundle that is not committed by then is given up."""
    gpu_free_s: float = 30.0
    """A GPU whose memory is not free by then after its last worker is quarantined."""
    warm_workers: int = 1
    drain_order_s: float = 10.0
    """An order to drain that is not repeated for so long is over."""


@dataclass(slots=True)
class State:
    """Everything that the machine decides from."""

    incarnation: int = 0
    fenced: bool = False
    """Whether its incarnation is over, and the next one has not begun."""
    epoch: int = 0
    policy: Policy = Policy()
    workers: dict[str, WorkerEntry] = field(default_factory=dict)
    leases: dict[str, LeaseEntry] = field(default_factory=dict)
    bundles: dict[str, BundleEntry] = field(default_factory=dict)
    gpus: dict[int, GpuEntry] = field(default_factory=dict)
    """Those that can be measured; the others are free as soon as their workers are gone."""
    ended_leases: dict[str, None] = field(default_factory=dict)
    finished_jobs: dict[str, None] = field(default_factory=dict)
    drained_until_s: float = 0.0
    """Until then the node is drained: no worker is kept for work to come. The order is repeated."""

    def env_keys(self) -> set[str]:
        """Return the keys of the environments that workers have, or are to have."""
        keys = {worker.env_key for worker in self.workers.values()}
        return keys | {entry.env_key for entry in self.leases.values()}

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
        use = self.gpu_use()
        broken += [
            f"GPU {index} is in use, and is not known to be free"
            for index, gpu in self.gpus.items()
            if gpu.left_at_s is not None and (index in use or gpu.quarantine)
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
            if worker.phase is WorkerPhase.TERMINATING and worker.stop is None:
                broken.append(f"{worker.worker_id} is to end and nothing sees to it")
            if worker.phase is WorkerPhase.IDLE and worker.stop is not None:
                broken.append(f"{worker.worker_id} is idle and on its way to its end")
        held = (*self.leases, *self.bundles)
        broken.extend(f"{one} is held and ended" for one in held if one in self.ended_leases)
        return broken


def remember(recent: dict[str, None], key: str) -> None:
    """Keep ``key`` among the last few thousand."""
    recent[key] = None
    if len(recent) > _REMEMBERED:
        del recent[next(iter(recent))]
