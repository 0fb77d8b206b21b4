"""Nodes, their devices and workers, and the leases that give a runtime the right to use a worker.

Spoken between gcs, scheduler, nodelets and owners of leases. Everything that a former node incarnation or
scheduler might still send carries the incarnation or epoch that fences it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.constraints.conditions import NodeCondition
from stoker_wire.constraints.taints import (
    MAX_TAINTS,
    Taint,
    TaintRemoval,
    TaintText,
    Toleration,
    Tolerations,
)
from stoker_wire.messages.common import (
    INDEX_KEYS,
    Address,
    Amount,
    Asked,
    Count,
    Int64,
    Labels,
    MemoryUse,
    Message,
    Name,
    NodeFilterText,
    NodeId,
    NodeLabels,
    Offered,
    OnInfeasible,
    Part,
    Record,
    RequestId,
    Resources,
    RuntimeEnv,
    Selector,
    ServiceUrl,
    Strategy,
    Text,
    Time,
    UnixUser,
    stated,
)

MAX_MEASURES = 8192
"""Values that a heartbeat brings; each GPU has some."""
MAX_WARM_KERNELS = 64
"""Kernel sets that a node reports: the most recently used ones."""


MAX_GRACE_S = 86_400.0
GraceS = Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)]


class NodeState(StrEnum):
    """ALIVE -> SUSPECT (heartbeats late) -> DEAD (terminal for the incarnation)."""

    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"


class Link(StrEnum):
    """The path between two GPUs of a node, the shortest first."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    """Through PCIe switches alone."""
    NUMA = "numa"
    """Through the CPU, within one NUMA node."""
    SYSTEM = "system"
    """Through the interconnect between CPUs."""


class Device(Record):
    """One accelerator: a GPU, or a MIG slice of one, which has a ``mig_profile`` and a ``parent_uuid``.

    ``memory_bytes`` is its total memory; ``fake`` ones exist for tests. ``arch`` is its compute capability,
    as 90 for sm_90; 0 where that is unknown. ``numa_node`` is -1 where that is unknown. ``links`` maps the
    index of every other device to the path to it, if the node knows them. ``quarantine`` is why no lease
    gets it, empty while it is in use.
    """

    index: Int64
    uuid: str
    name: str
    memory_bytes: Int64 = 0
    fake: bool = False
    arch: Int64 = 0
    mig_profile: str = ""
    parent_uuid: str = ""
    numa_node: Int64 = -1
    links: Annotated[dict[Int64, Link], INDEX_KEYS] = {}
    quarantine: str = ""


MAX_GPUS = 1024
GPU_INDEX = "[0-9]{1,4}"
"""The pattern of the number of a GPU in a URL."""
NodeResources = Annotated[
    dict[str, Part],
    msgspec.Meta(description="name -> amount; memory in bytes"),
    stated(properties={"GPU": {"type": "integer", "minimum": 0, "maximum": MAX_GPUS}}),
]


class RegisterNode(Message):
    """Registration of a node by its nodelet. ``host_id`` is equal for processes that share a /dev/shm.

    ``warm_kernels`` are the kernel sets (``stoker_wire.messages.kernels.kernel_set``) that its cache holds.
    ``gpu_error`` is why its GPUs could not be found, empty if they were or if it has none.
    ``gpu_isolation`` is what keeps workers off GPUs not of their lease (``cgroup v1``, ``cgroup v2``);
    where it is empty ``gpu_isolation_error`` is why, unless the node has no GPUs.
    ``last_incarnation`` is the one that it had before, which a gcs whose database was restored may not know.
    """

    node_id: NodeId
    url: ServiceUrl
    unix: str
    hostname: str
    host_id: str
    pid: Int64
    resources: NodeResources
    devices: tuple[Device, ...] = ()
    labels: NodeLabels = {}
    version: str = ""
    arena_dir: str = ""
    session_dir: str = ""
    warm_kernels: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_WARM_KERNELS)] = ()
    driver_version: str = ""
    cuda_version: str = ""
    gpu_error: str = ""
    gpu_isolation: str = ""
    gpu_isolation_error: str = ""
    taints: Annotated[tuple[Taint, ...], msgspec.Meta(max_length=MAX_TAINTS)] = ()
    conditions: Annotated[tuple[NodeCondition, ...], msgspec.Meta(max_length=16)] = ()
    last_incarnation: Count = 0


class RegisteredNode(Record):
    """Reply to a registration. The incarnation fences what the nodelet sends, ``epoch`` former schedulers."""

    node_id: str
    incarnation: int
    heartbeat_s: float
    epoch: int = 0


class Heartbeat(Message):
    """Heartbeat of a node.

    ``usage`` is measured: cpu_percent, memory_bytes, workers, object_bytes, load1, ...; of GPUs
    ``gpu0_held``, ``gpu0_percent``, ``gpu0_memory_bytes``, ``gpu0_ecc_errors``.
    ``warm_kernels`` are the kernel sets in the node's cache, ``devices`` its GPUs, ``conditions`` why it
    takes no new work; each None while it is unchanged.
    """

    incarnation: Int64
    usage: Annotated[dict[str, Amount], msgspec.Meta(max_length=MAX_MEASURES)] = {}
    warm_kernels: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_WARM_KERNELS)] | None = (
        None
    )
    devices: tuple[Device, ...] | None = None
    conditions: Annotated[tuple[NodeCondition, ...], msgspec.Meta(max_length=16)] | None = None


class Cordon(Record):
    """The order that nothing more be placed on a node: who gave it, since when, and why."""

    by: str
    at_s: float
    reason: str = ""

    @property
    def text(self) -> str:
        """The order in words."""
        since = datetime.fromtimestamp(self.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"cordoned by {self.by} since {since}" + (f": {self.reason}" if self.reason else "")


class CordonNode(Message):
    """Request to place nothing more on a node; what runs there goes on."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Drain(Record):
    """The order that a node be emptied, and then leave: who gave it, why, and by when."""

    by: str
    began_at_s: float
    deadline_at_s: float
    reason: str = ""
    ended_at_s: float = 0.0
    """When the node left, empty; 0 before that."""

    @property
    def text(self) -> str:
        """The order in words."""
        until = datetime.fromtimestamp(self.deadline_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"drained by {self.by} until {until}" + (f": {self.reason}" if self.reason else "")


class DrainNode(Message):
    """Request to empty a node: what is there finishes, or is moved; at the deadline the rest is ended."""

    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=7 * 86_400)] = 300.0
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Remainder(Record):
    """A part of what keeps a node from being drained: a lease, a worker, or objects; and why it is there."""

    kind: str
    id: str = ""
    name: str = ""
    why: str = ""


class DrainStatus(Record):
    """The state of a node's drain, in a sentence, and what is left there."""

    node_id: str
    state: str
    """NONE, DRAINING, DRAINED, or DEAD: it died before it was empty."""
    summary: str
    drain: Drain | None = None
    left: tuple[Remainder, ...] = ()


class ChangeTaints(Message):
    """Request to change a node's taints: ``remove`` those of a key (``key-``), then ``add``."""

    add: Annotated[tuple[TaintText, ...], msgspec.Meta(max_length=MAX_TAINTS)] = ()
    remove: Annotated[tuple[TaintRemoval, ...], msgspec.Meta(max_length=MAX_TAINTS)] = ()


class Node(Record):
    """A node as the gcs knows it. ``cordon`` is there while nothing more is placed on it."""

    node_id: str
    incarnation: int
    state: NodeState
    url: str
    unix: str
    hostname: str
    host_id: str
    pid: int
    resources: Resources
    devices: tuple[Device, ...]
    labels: Labels
    version: str
    arena_dir: str
    session_dir: str
    registered_at_s: float
    heartbeat_at_s: float = 0.0
    usage: dict[str, float] = {}
    reason: str = ""
    warm_kernels: tuple[str, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    gpu_error: str = ""
    gpu_isolation: str = ""
    gpu_isolation_error: str = ""
    taints: tuple[Taint, ...] = ()
    cordon: Cordon | None = None
    drain: Drain | None = None
    objects_at: str = ""
    """The node that takes over its objects when it is drained."""
    conditions: tuple[NodeCondition, ...] = ()

    @property
    def death(self) -> str:
        """The clause of an error that says which node this is, since when it is dead, and why."""
        return self.end + (f" ({self.reason})" if self.reason else "")

    @property
    def end(self) -> str:
        """The clause of an error that says which node this is, and since when it is dead."""
        since = datetime.fromtimestamp(self.heartbeat_at_s, UTC).strftime("%H:%M:%S UTC")
        return f"node {self.node_id} on {self.hostname} is dead since {since}"


class LeaseKind(StrEnum):
    """Use of a leased worker."""

    TASK = "task"
    ACTOR = "actor"
    DRIVER = "driver"
    BUNDLE = "bundle"
    """No worker: the lease reserves resources for the work of a placement group."""


class Demand(Message):
    """Requirements of work; tasks with equal demands form a scheduling class and are interchangeable.

    ``label_selector`` maps a label to ``value``, ``!value``, ``in(a,b)`` or ``!in(a,b)``.
    ``node_filter`` is a condition that the node must meet besides.
    ``locality`` maps node ids to bytes of large arguments that are already there. ``preemptible`` work may be
    ended while it runs, ``preemption_grace_s`` after its notice (None: as the cluster is set). ``background``
    work has what other work leaves free, and is ended when that needs it. What is in a placement group
    (``strategy``) is no background work, and has no filter of its own.
    """

    job_id: Name
    resources: Asked
    kind: Annotated[LeaseKind, stated(enum=["task", "actor", "driver"])] = LeaseKind.TASK
    runtime_env: RuntimeEnv = RuntimeEnv()
    label_selector: Selector = {}
    node_filter: NodeFilterText = ""
    strategy: Strategy = Strategy()
    priority: Int64 = 0
    on_infeasible: OnInfeasible = OnInfeasible.ERROR
    locality: Annotated[dict[str, Int64], msgspec.Meta(max_length=10_000)] = {}
    name: Text = ""
    preemptible: bool = False
    preemption_grace_s: GraceS | None = None
    background: bool = False
    tolerations: Tolerations = ()


class ActorSpec(Message):
    """Definition of the actor that a worker becomes; ``payload`` is opaque to all but the runtime."""

    actor_id: str
    incarnation: Int64
    class_name: str
    payload: bytes
    restartable: bool = False
    """Whether another is started if its worker dies."""
    saves_state: bool = False
    """Whether its class has the hooks that carry its state over a restart."""


class DriverSpec(Message):
    """The process of a submitted job: ``entrypoint`` is run by a shell, with ``env`` added."""

    job_id: str
    entrypoint: str
    env: dict[str, str] = {}
    attempt: Int64 = 1


class WorkerSpec(Message):
    """The worker that the nodelet provides for a lease."""

    runtime_env: RuntimeEnv = RuntimeEnv()
    actor: ActorSpec | None = None
    driver: DriverSpec | None = None
    capture_child_tasks: bool = False
    acts_for: str = ""
    """The detached actor whose token its process gets: the one that asked for it, or whose tasks did."""
    run_as: UnixUser = ""
    """The Unix user that its process is to be, as the scheduler has it from the job; none: the nodelet's."""


class LeaseRequest(Message):
    """Request for up to ``count`` workers; the reply comes when one is granted or ``wait_s`` passed.

    A request that is sent again with the same ``request_id`` gets the same leases again.
    ``task_ids`` are some of the waiting tasks, for explanations.
    """

    request_id: RequestId
    owner_id: str
    demand: Demand
    count: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    actor: ActorSpec | None = None
    driver: DriverSpec | None = None
    task_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=1000)] = ()
    acts_for: str = ""
    """The detached actor that the caller's token is of, as the scheduler has seen."""
    run_as: UnixUser = ""
    """The Unix user of the workers; whatever a caller says, the scheduler puts that of the job."""
    owner_node_id: str = ""
    """The node whose end is the owner's; none for a driver, which ends with its job."""


class Lease(Record):
    """A time-bounded, fenced right of ``owner_id`` to use one worker with ``resources``.

    ``gpus`` maps a device index to the fraction of it that the lease holds. ``bundle`` is the number of the
    bundle of ``group_id`` that it reserves, or that its worker is in. ``preemptible`` and what follows are
    for a new scheduler that adopts it.
    """

    lease_id: str
    owner_id: str
    job_id: str
    kind: LeaseKind
    node_id: str
    node_incarnation: Int64
    resources: Offered
    gpus: Annotated[dict[Int64, Amount], INDEX_KEYS] = {}
    granted_at_s: Time = 0.0
    blocked: bool = False
    actor_id: str = ""
    name: str = ""
    group_id: str = ""
    bundle: Int64 = -1
    preemptible: bool = False
    preemption_grace_s: GraceS | None = None
    priority: Int64 = 0
    background: bool = False
    owner_node_id: str = ""
    tolerations: tuple[Toleration, ...] = ()


class GrantedLease(Record):
    """A lease together with the worker it gives access to (none, if it is a bundle's)."""

    lease: Lease
    worker_id: str
    address: Address
    pid: int = 0


class LeaseReply(Record):
    """Leases granted by one request; ``queue_position`` counts the demands ahead if none was."""

    granted: tuple[GrantedLease, ...] = ()
    queue_position: int = 0
    note: str = ""


class StartLease(Message):
    """Order of the scheduler to a nodelet to give a lease a worker. Fenced by ``epoch``."""

    lease: Lease
    epoch: Int64
    worker: WorkerSpec = WorkerSpec()


class StartedLease(Record):
    """The worker that serves the lease."""

    worker_id: str
    address: Address
    pid: int


class HeldLease(Record):
    """A lease that a nodelet holds, as it reports it to a new scheduler.

    A ``prepared`` bundle was not committed.
    """

    lease: Lease
    worker_id: str
    address: Address
    pid: int
    prepared: bool = False


class HeldLeases(Record):
    """All leases of one nodelet, with its incarnation."""

    node_id: str
    incarnation: int
    leases: tuple[HeldLease, ...] = ()


class ReleaseLeases(Message):
    """Request to release leases. ``kill`` ends the workers instead of returning them to the pool."""

    lease_ids: tuple[str, ...]
    kill: bool = False
    reason: str = ""
    epoch: Int64 = 0


class StopLeases(Message):
    """Order of the scheduler to a nodelet to preempt leases: notice, and the end ``grace_s`` later."""

    lease_ids: tuple[str, ...]
    grace_s: GraceS
    reason: str
    epoch: Int64


class OwnerPoll(Message):
    """The list of all leases that an owner has; it waits up to ``wait_s`` for changes.

    Those that it does not list any more end soon. While it says nothing it keeps what it has listed: it may
    be busy, or stopped.
    """

    lease_ids: tuple[str, ...] = ()
    idle_lease_ids: tuple[str, ...] = ()
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    number: Count = 0
    """Counts up, so that a list which comes late is not taken for the newest; 0: it is."""


class LeaseUpdates(Record):
    """Changes to leases that their owner must hear of.

    ``preempted``: finish what runs and release. ``lost``: ended already (expired, node dead). ``epoch`` is
    that of the leader, 0 from one of an earlier version.
    """

    preempted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    epoch: int = 0


class BlockLease(Message):
    """Report that the worker of a lease waits in ``get`` (its CPU is free to others), or runs again."""

    blocked: bool


class WorkerState(StrEnum):
    """STARTING -> IDLE <-> LEASED -> DEAD."""

    STARTING = "STARTING"
    IDLE = "IDLE"
    LEASED = "LEASED"
    DEAD = "DEAD"


class WorkerExit(Record):
    """Exit forensics: one cause and its evidence, never a list of guesses.

    ``exit_code`` or ``signal`` is set (the other is None); ``peak_rss_bytes`` from wait4;
    ``cause`` is a sentence such as "killed by SIGSEGV" or "exceeded memory=1073741824 bytes".
    A ``preempted`` worker had notice of its end: what ran there is not to blame.
    """

    worker_id: str
    node_id: str
    job_id: str = ""
    lease_id: str = ""
    actor_id: str = ""
    pid: Int64 = 0
    exit_code: Int64 | None = None
    signal: Int64 | None = None
    oom: bool = False
    expected: bool = False
    preempted: bool = False
    peak_rss_bytes: Int64 = 0
    at_s: Time = 0.0
    cause: str = ""
    last_log_lines: tuple[str, ...] = ()
    memory: MemoryUse | None = None
    overdue: str = ""
    """The task that it ran when its nodelet ended it, long after the task's timeout."""


class WorkersExited(Message):
    """A batch of exits, from a nodelet to the gcs."""

    exits: tuple[WorkerExit, ...]
    incarnation: Int64 = 0


class Worker(Record):
    """A worker as its nodelet lists it."""

    worker_id: str
    node_id: str
    pid: int
    state: WorkerState
    lease_id: str = ""
    job_id: str = ""
    actor_id: str = ""
    started_at_s: float = 0.0
    rss_bytes: int = 0


class ClusterResources(Record):
    """Sums over the live nodes, and per node: what there is and what no lease holds."""

    total: Resources
    available: Resources
    nodes: dict[str, Resources] = {}
    nodes_available: dict[str, Resources] = {}
