"""Messages of a nodelet's own HTTP API, and between it and its workers, beside those that services share.

A nodelet answers the queries; the gcs, the command line and other nodelets ask. They travel, so they are
defined here, whoever else needs them.
"""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import ActorSpec, HeldLease, Lease
from stoker_wire.messages.common import (
    Address,
    Count,
    Finite,
    Id,
    Int64,
    Message,
    Record,
    RuntimeEnv,
    Seconds,
    Text,
    Time,
)
from stoker_wire.messages.control import ListQuery, Position
from stoker_wire.messages.objects import ObjectInfo


class WorkersQuery(ListQuery):
    """A choice of workers; an empty field means all."""

    job_id: str = ""


class ActivityKind(StrEnum):
    """The kinds of what a node does beside running calls."""

    TRANSFER = "transfer"
    """An object came from the node ``peer``."""
    SPILL = "spill"
    """An object went to disk."""
    LEASE = "lease"
    """A worker was made ready for a lease, with its environment."""
    GPUS = "gpus"
    """From then on so many GPUs (``amount``) were in use."""


class NodeActivity(Record):
    """A thing that a node did: of an object, or of a worker (``name``)."""

    number: Count
    kind: ActivityKind
    began_at_s: Time
    ended_at_s: Time
    name: str = ""
    job_id: str = ""
    peer: str = ""
    nbytes: Count = 0
    amount: float = 0.0


class WorkerExitQuery(Message):
    """The time to wait for the exit of a worker that lives."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class BuildState(StrEnum):
    """The state of an environment that a node installs."""

    INSTALLING = "INSTALLING"
    READY = "READY"
    FAILED = "FAILED"


class EnvironmentBuild(Record):
    """The environment that a node installs, first for the job ``job_id``; then others share it.

    ``what`` is as :attr:`stoker_wire.messages.common.RuntimeEnv.installs` says it, ``key`` names the
    folder. ``took_s`` is of one that is ready or failed, ``message`` why it failed.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1)]
    job_id: Annotated[str, msgspec.Meta(min_length=1)]
    key: Id
    what: Text
    state: BuildState
    took_s: Seconds = 0.0
    message: Text = ""


MAX_BUILDS = 100
"""The most in one report."""


class ReportBuilds(Message):
    """A batch of changes of builds, in their order, from a nodelet to the gcs."""

    builds: Annotated[tuple[EnvironmentBuild, ...], msgspec.Meta(max_length=MAX_BUILDS)]


class Process(Record):
    """A process on a node; ``started`` is in clock ticks since boot."""

    pid: int
    started: int
    pid_namespace: str


class KillWorker(Message):
    """Request to kill a worker, with ``lease_id`` only if it serves that; its exit says ``reason``."""

    reason: str = "killed over the API"
    lease_id: str = ""


class MetricKind(StrEnum):
    """Kind of a metric: how its values come together."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_TagName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=100)]
_TagValue = Annotated[str, msgspec.Meta(max_length=500)]


class MetricSeries(Message):
    """Value of a metric for one combination of tags: what was added since the last report; a gauge as it is.

    ``value`` of a histogram is the sum of what was observed, and ``counts`` is how much of that was up to
    each boundary and above the one before, and above the last.
    """

    tags: Annotated[tuple[_TagValue, ...], msgspec.Meta(max_length=32)]
    value: Finite
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=201)] = ()


class ReportedMetric(Message):
    """A metric that a program counts. A name that begins with ``stoker_`` is refused."""

    name: Annotated[
        str, msgspec.Meta(pattern="^(?!stoker_)[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=200)
    ]
    kind: MetricKind
    description: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    tag_keys: Annotated[tuple[_TagName, ...], msgspec.Meta(max_length=32)] = ()
    boundaries: Annotated[tuple[Finite, ...], msgspec.Meta(max_length=200)] = ()
    series: Annotated[tuple[MetricSeries, ...], msgspec.Meta(max_length=10_000)] = ()


class ReportMetrics(Message):
    """The metrics of one process of a job; one of an admin's names its job."""

    process: Annotated[str, msgspec.Meta(max_length=100)]
    job_id: Annotated[str, msgspec.Meta(max_length=100)] = ""
    metrics: Annotated[tuple[ReportedMetric, ...], msgspec.Meta(max_length=1000)] = ()


class ScrapeTargets(Record):
    """Addresses whose ``/metrics`` Prometheus is to read, as its HTTP service discovery asks for them.

    A label ``__scheme__`` is for Prometheus alone.
    """

    targets: tuple[str, ...]
    labels: dict[str, str] = {}


class DrainOrder(Message):
    """Order of the gcs to a nodelet that is drained, given again and again: idle workers are to leave."""


class HeldWork(Record):
    """Leases, workers and objects that are on a node that is drained.

    ``workers`` are processes without a lease that others still need: they own objects, calls or actors.
    ``objects`` counts those whose home is here, and that no other node has taken over.
    """

    leases: tuple[HeldLease, ...] = ()
    workers: tuple[str, ...] = ()
    objects: int = 0


class LeaveOrder(Message):
    """Order of the gcs to a nodelet that is empty to leave the cluster, and to end; for one incarnation."""

    incarnation: Int64


class MoveWorker(Message):
    """Request that an actor take no more calls, finish what runs, and end to be started elsewhere."""

    reason: str


class TakenOver(Record):
    """Objects that are left on a node after others were taken over."""

    left: int = 0


class ObjectsQuery(ListQuery):
    """A choice of objects; an empty field means all."""

    job_id: str = ""
    owner_id: str = ""


class LogsQuery(Message):
    """A choice of log lines. ``kind`` is ``worker``, ``driver`` or empty (both).

    ``since`` is the cursor of the last line seen, with a ``worker_id``; ``tail`` starts so many
    lines before the end. ``attempt`` is that of the driver (0: any).
    """

    job_id: str = ""
    worker_id: str = ""
    kind: str = ""
    attempt: Count = 0
    follow: bool = False
    since: Position = 0
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class ChunksQuery(Message):
    """The chunk to wait for, at most ``wait_s``."""

    chunk: Count = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 0.0


class ArenaUsage(Record):
    """The use of a node's shared memory.

    ``used_bytes`` of ``limit_bytes`` are taken: by objects (``object_bytes``), by extents that wait
    to be used again (``recycled_bytes``), and by the rounding of both.
    """

    arena_dir: str
    limit_bytes: int
    used_bytes: int
    free_bytes: int
    object_bytes: int
    recycled_bytes: int
    spilled_bytes: int
    objects: int
    largest: tuple[ObjectInfo, ...] = ()


class Freed(Record):
    """The number of the objects that were here and are freed."""

    freed: int


class RegisterWorker(Message):
    """Registration of a forked worker, which listens at ``address``."""

    worker_id: str
    pid: Int64
    address: Address


class WorkerBoot(Record):
    """Start parameters that a fork server passes to ``target(boot)`` in a worker that it has just forked.

    The runtime environment is already applied: ``env_vars``, ``sys.path``, the current directory,
    and stdout and stderr go to ``log_path``. The worker listens on the Unix socket ``socket_path``
    (short enough for ``sun_path``), then registers with ``POST <nodelet>/v1/workers/register``.
    ``job_id`` is empty for a warm worker that no job has used; ``POST /v1/assign`` gives it one.
    By ``token`` it and its nodelet know each other; that of its job comes with its setup.
    ``mark_key`` authenticates its marks in its log (:mod:`stoker_wire.data.output_marks`).
    One that runs as another user than its nodelet (``run_as``) has no folder of the node: ``socket_fd`` is
    its socket, already bound.
    """

    worker_id: str
    node_id: str
    host_id: str
    nodelet_url: str
    nodelet_unix: str
    gcs_url: str
    token: str
    session_dir: str
    arena_dir: str
    socket_path: str
    log_path: str
    job_id: str = ""
    runtime_env: RuntimeEnv = RuntimeEnv()
    mark_key: bytes = b""
    run_as: str = ""
    socket_fd: int = -1


class WorkerSetup(Record):
    """Identity of a registered worker and, for an actor, its definition.

    The reply to its registration, and the body of ``POST <worker>/v1/assign`` for a worker of the
    pool. ``token`` is that of the job of ``lease``. ``env_vars``, ``sys_path`` (see
    ``stoker_wire.process.search_path``) and ``cwd`` (empty: stay) are to be applied before any user
    import; they hold ``CUDA_VISIBLE_DEVICES`` and are empty where the fork applied them.
    ``runtime_env`` is that of the lease: what the worker starts inherits it, and with
    ``capture_child_tasks`` the placement group of the lease.
    """

    worker_id: str
    node_id: str
    token: str = ""
    lease: Lease | None = None
    actor: ActorSpec | None = None
    runtime_env: RuntimeEnv | None = None
    capture_child_tasks: bool = False
    arena_dir: str = ""
    env_vars: dict[str, str] = {}
    sys_path: tuple[str, ...] = ()
    cwd: str = ""


class RenewToken(Message):
    """The token of the job of a worker, signed by another secret than before."""

    token: str


class StopNotice(Message):
    """Notice to a worker that it ends in ``grace_s``, and why; if it ``saves``, an actor saves its state."""

    lease_id: str
    grace_s: float
    reason: str
    saves: bool = False


class StopReply(Record):
    """Reply of a worker once its stop callbacks have run: how many there were."""

    callbacks: int = 0


MAX_PROFILE_S = 300.0
MAX_PROFILE_NBYTES = 64 << 20
"""A profile that is larger is given up: it would be read by nobody."""
STACK_SIGNAL = int(signal.SIGRTMAX) - 5
"""The signal at which a worker writes its stacks, and the name of the file in memory that it writes to."""
STACK_FILE = "stoker-stacks"
MAX_THREADS = 200
MAX_STACK_FRAMES = 200


class StackWay(StrEnum):
    """The ways by which stacks of a process are read, the best first.

    ``py-spy`` reads the memory of the process from outside. ``worker``: its own loop thread looks, which
    takes the interpreter. ``signal``: Python's faulthandler writes them, whatever holds the interpreter.
    """

    PY_SPY = "py-spy"
    WORKER = "worker"
    SIGNAL = "signal"


class StackFrame(Record):
    """A function that runs, and the line where it is."""

    function: str
    file: str = ""
    line: int = 0


class ThreadStack(Record):
    """A thread, or a task of an event loop, with its frames: the innermost first.

    ``active`` and ``holds_gil`` are known by py-spy alone.
    """

    name: str = ""
    frames: tuple[StackFrame, ...] = ()
    active: bool | None = None
    holds_gil: bool | None = None


class WorkerStacks(Record):
    """The answer of a worker about itself: its threads, the tasks of its event loops, and its calls."""

    threads: tuple[ThreadStack, ...] = ()
    coroutines: tuple[ThreadStack, ...] = ()
    task_ids: tuple[str, ...] | None = None
    """The calls that run here; null if that is not known."""


class ProcessStacks(WorkerStacks):
    """The stacks of one process, and the way by which they were read.

    ``why_not_better`` says why a better way was not taken. ``error``: there are none, and why.
    """

    worker_id: str = ""
    node_id: str = ""
    job_id: str = ""
    pid: int = 0
    way: StackWay | None = None
    why_not_better: str = ""
    error: str = ""


class Stacks(Record):
    """The stacks of the processes that a target has; ``left_out`` is how many more there are."""

    target: str
    processes: tuple[ProcessStacks, ...]
    note: str = ""
    left_out: int = 0


Target = Annotated[
    str,
    msgspec.Meta(
        min_length=2,
        max_length=200,
        description="id of a task, an actor, a worker, a job or (stacks) a node, or its beginning",
        examples=["t_01"],
    ),
]


class StacksQuery(Message):
    """Whose stacks to read."""

    target: Target


class ProfileKind(StrEnum):
    """``cpu``: where the time goes (py-spy). ``memory``: what is allocated (memray). ``torch``: operators
    and kernels (torch.profiler).
    """

    CPU = "cpu"
    MEMORY = "memory"
    TORCH = "torch"


class ProfileFormat(StrEnum):
    """The formats of profiles: ``raw`` is folded stacks, ``trace`` is Chrome's."""

    SVG = "svg"
    SPEEDSCOPE = "speedscope"
    RAW = "raw"
    TRACE = "trace"
    HTML = "html"


PROFILE_FORMATS = {
    ProfileKind.CPU: (
        ProfileFormat.SVG,
        ProfileFormat.SPEEDSCOPE,
        ProfileFormat.RAW,
        ProfileFormat.TRACE,
    ),
    ProfileKind.MEMORY: (ProfileFormat.HTML,),
    ProfileKind.TORCH: (ProfileFormat.TRACE,),
}
"""The formats that each kind has; the first is its default."""
PROFILE_TYPES = {
    ProfileFormat.SVG: "image/svg+xml",
    ProfileFormat.SPEEDSCOPE: "application/json",
    ProfileFormat.RAW: "text/plain; charset=utf-8",
    ProfileFormat.TRACE: "application/json",
    ProfileFormat.HTML: "text/html; charset=utf-8",
}


class ProfileOptions(Message):
    """The kind of a profile, its length and its format (empty: the kind's first).

    ``rate`` is samples per second, ``native`` has frames of C and C++ too, ``gil`` only those of the thread
    that holds the interpreter: of a ``cpu`` profile.
    """

    kind: ProfileKind = ProfileKind.CPU
    seconds: Annotated[float, msgspec.Meta(ge=0.1, le=MAX_PROFILE_S)] = 10.0
    format: ProfileFormat | None = None
    rate: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    native: bool = False
    gil: bool = False


class TakeProfile(ProfileOptions, kw_only=True):
    """A profile of the process of a target."""

    target: Target


class TakeWorkerProfile(ProfileOptions, kw_only=True):
    """A profile of a worker, as long as it works for this job."""

    job_id: str


class RecordProfile(Message):
    """The order to a worker to record itself for so long."""

    kind: ProfileKind
    seconds: float
