"""Jobs, actors and tasks: the work of users, and its records.

Jobs and actors are owned by the gcs, tasks by the process that submitted them; what the gcs has of tasks is
history.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.constraints.taints import Toleration, Tolerations
from stoker_wire.data.spans import TaskSpans
from stoker_wire.messages.cluster import Demand, GraceS
from stoker_wire.messages.common import (
    ANY_NAMESPACE,
    MAX_INT64,
    MAX_TEXT,
    ActorId,
    Address,
    Amount,
    Asked,
    Count,
    ErrorInfo,
    Id,
    Int64,
    JobId,
    Labels,
    Message,
    Metadata,
    Name,
    NodeFilterText,
    PositiveSeconds,
    Record,
    Resources,
    RuntimeEnv,
    Seconds,
    Selector,
    Text,
    Time,
    stated,
)
from stoker_wire.messages.elastic import ElasticState
from stoker_wire.messages.queues import DEFAULT_QUEUE

DETACHED_JOB = "job_detached"
"""The job of detached actors and their tasks: it never ends, so nothing is cleaned up after it."""

Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]


class JobState(StrEnum):
    """PENDING -> RUNNING -> SUCCEEDED | FAILED | STOPPED (terminal)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows this state."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class After(StrEnum):
    """The end that a job must have come to before one that depends on it may start."""

    ANY = "any"
    OK = "ok"
    FAILED = "failed"


class Dependency(Message):
    """A job that must have ended first; one that ended otherwise than ``condition`` fails this one."""

    job_id: str
    condition: After = After.ANY


MAX_ARRAY = 10_000
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class JobArray(Message):
    """The indices of a job array, each there once, at most ``parallelism`` of them at a time (0: all).

    Each is a job ``JOB.INDEX``, which finds its index in ``STOKER_ARRAY_INDEX``.
    """

    indices: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MAX_ARRAY)]
    parallelism: Count = 0


class OnePerNode(Message):
    """One job for each node that is alive and can run it when the whole starts, ``JOB.0`` and so on.

    At most ``parallelism`` of them run at a time (0: all).
    """

    parallelism: Count = 0


MAX_RETRIES = 100
RETRY_DELAY_S = 10.0
Entrypoint = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")]
"""A shell command."""


class SubmitJob(Message):
    """Request to run ``entrypoint`` (a shell command) on the cluster as a driver.

    ``job_id`` may be chosen by the caller (submitting the same twice is then a conflict).
    ``resources`` are those of the driver process itself (default: none). ``queue`` and ``priority`` are
    those of the driver and of all that it starts (a task's own priority is added). The job fails unless
    its driver has started within ``start_deadline_s``, and when it runs for longer than ``timeout_s``. It
    starts when the jobs ``after`` which it comes have ended. With an ``array`` it is one job for each index,
    with ``one_per_node``, which no array has, one for each node. A driver that fails is run again,
    up to ``retries`` times: ``retry_delay_s`` later, then twice as long each time. The driver of a
    ``preemptible`` job may be ended for work with a better claim, ``preemption_grace_s`` after its notice
    (null: as the cluster is set), and is run again when there is room, which uses up no retry.
    """

    entrypoint: Entrypoint
    job_id: JobId | None = None
    runtime_env: RuntimeEnv = RuntimeEnv()
    metadata: Metadata = {}
    resources: Asked = {}
    label_selector: Selector = {}
    node_filter: NodeFilterText = ""
    tolerations: Tolerations = ()
    namespace: Name | None = None
    name: Name = ""
    queue: Name = ""
    priority: Priority = 0
    start_deadline_s: PositiveSeconds | None = None
    timeout_s: PositiveSeconds | None = None
    after: Annotated[tuple[Dependency, ...], msgspec.Meta(max_length=1000)] = ()
    array: JobArray | None = None
    one_per_node: OnePerNode | None = None
    retries: Annotated[int, msgspec.Meta(ge=0, le=MAX_RETRIES)] = 0
    retry_delay_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = RETRY_DELAY_S
    preemptible: bool = False
    preemption_grace_s: GraceS | None = None


class ReportSlowRank(Message):
    """Report of a trainer that one of its ranks is slow.

    ``ratio`` is the time of its steps by that of the others since ``since_s``; ``group`` names the ranks
    among which ``rank`` counts, where the job has several.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1)]
    rank: Count
    ratio: Annotated[float, msgspec.Meta(gt=1, le=1e6)]
    since_s: Time
    group: str = ""


class SlowRank(Record):
    """A slow rank as it was reported; fields as in :class:`ReportSlowRank`."""

    job_id: str
    node_id: str
    rank: int
    ratio: float
    since_s: float
    group: str = ""


MAX_SLOW_STACK = 16_384


class ReportSlowTask(Message):
    """Report of a worker that an attempt runs much longer than ``runs`` earlier ones of its function.

    ``p99_s`` is their 99th percentile, ``stack`` where it is now, as text.
    """

    attempt: Count
    name: Name
    ran_s: Seconds
    p99_s: Seconds
    runs: Count
    worker_id: Name
    stack: Annotated[str, msgspec.Meta(max_length=MAX_SLOW_STACK)]


class SlowTask(Record):
    """A slow attempt as it was reported; fields as in :class:`ReportSlowTask`."""

    job_id: str
    task_id: str
    attempt: int
    name: str
    ran_s: float
    p99_s: float
    runs: int
    worker_id: str
    stack: str


class NodeOutput(Record):
    """The files in a job's output folder on one node; ``shared`` if all nodes see the same folder."""

    node_id: str
    path: str
    files: int
    nbytes: int
    shared: bool = False


class JobOutput(Record):
    """The output of a job on the living nodes, the driver's first.

    ``lost`` says why the driver's node is gone, if it is.
    """

    job_id: str
    nodes: tuple[NodeOutput, ...] = ()
    lost: str = ""


Attempt = Count


SESSION_BEAT_S = 1.0
"""How often each end of a driver's session says that it answers."""
SESSION_BEAT = ""
"""What it says. Another text is a :class:`SessionMessage`, which a peer of an older version ignores."""
JOB_IS_OVER = 4409
"""The code with which the gcs closes the session of a job that has ended; its reason says how it ended."""


class SessionMessage(Record):
    """A text of a driver's session, in JSON.

    The gcs sends the job's ``token`` where it is signed by another secret than the one that the driver
    shows; the driver answers with ``took``, that token's :func:`stoker_wire.http.auth.token_digest`.
    """

    token: str = ""
    took: str = ""


class AttachDriver(Message):
    """Request of a driver process to join the cluster: as a new job, or as the submitted job that it runs."""

    job_id: Name | None = None
    entrypoint: str = ""
    hostname: Name = ""
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    namespace: Name | None = None
    runtime_env: RuntimeEnv = RuntimeEnv()
    metadata: Metadata = {}
    queue: Name = ""
    priority: Priority = 0
    attempt: Attempt = 0
    """That of the submitted job whose driver it is; 0 if it does not know."""
    pid_started: Count = 0
    """When the process started, in clock ticks since boot: with the pid and its namespace its identity."""
    pid_namespace: str = ""


class FinishJob(Message):
    """Report by the driver (or its nodelet) of how the job ended, and of the node that has its log.

    One of an ``attempt`` before the present one changes nothing (0: the present one). A driver that was
    ``preempted`` is run again.
    """

    state: Annotated[JobState, stated(enum=["SUCCEEDED", "FAILED", "STOPPED"])]
    exit_code: Int64 | None = None
    message: str = ""
    node_id: str = ""
    attempt: Attempt = 0
    preempted: bool = False


class EndAttempt(Message):
    """Order to a nodelet to end what an attempt of a job, and those before it, have left there."""

    attempt: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT64)]


class JobAttempt(Record):
    """An attempt of a job that failed and was followed by another; ``cause`` in a line."""

    attempt: int
    started_at_s: float
    ended_at_s: float
    cause: str = ""
    exit_code: int | None = None
    node_id: str = ""
    lease_id: str = ""
    preempted: bool = False
    """Whether it was ended for other work, which uses up no retry."""


class Job(Record):
    """One driver program and all that it started."""

    job_id: str
    name: str
    entrypoint: str
    state: JobState
    submitted: bool
    namespace: str
    runtime_env: RuntimeEnv
    metadata: dict[str, str]
    resources: Resources
    created_at_s: float
    label_selector: Labels = {}
    node_filter: str = ""
    tolerations: tuple[Toleration, ...] = ()
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    message: str = ""
    node_id: str = ""
    hostname: str = ""
    pid: int = 0
    pid_started: int = 0
    pid_namespace: str = ""
    """Where an attached driver runs, see :class:`AttachDriver`."""
    lease_id: str = ""
    worker_id: str = ""
    """The process of a submitted job's driver, of this attempt."""
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    user: str = ""
    """The name of the token with which it was submitted."""
    token_id: str = ""
    """That token, if it can be revoked: an attached driver ends with it."""
    namespaces: tuple[str, ...] = (ANY_NAMESPACE,)
    """Those that its user may use, and so this job."""
    run_as: str = ""
    """The Unix user of its processes on nodelets that are root, from its user's token."""
    parent_job_id: str = ""
    """The job of which a process submitted it."""
    token: str = ""
    """The token of its processes, set only in the reply to its driver that attaches."""
    start_deadline_s: float | None = None
    timeout_s: float | None = None
    after: tuple[Dependency, ...] = ()
    array: JobArray | None = None
    """Set for a whole array, which has no driver."""
    array_id: str = ""
    """The array that it is a member of, and its ``array_index`` there."""
    array_index: int = 0
    one_per_node: OnePerNode | None = None
    """Set for the whole; ``array`` is set too, once it has started."""
    only_node_id: str = ""
    """The node that its driver must run on."""
    retries: int = 0
    retry_delay_s: float = RETRY_DELAY_S
    attempt: int = 1
    """The number of the present attempt, which has started at ``attempt_started_at_s``."""
    attempt_started_at_s: float | None = None
    retry_at_s: float | None = None
    """When the present attempt may start, if it is not the first."""
    attempts: tuple[JobAttempt, ...] = ()
    """The attempts before the present one."""
    schedule: str = ""
    """The schedule that submitted it."""
    preemptible: bool = False
    preemption_grace_s: float | None = None
    node_incarnation: int = 0
    """The incarnation of ``node_id`` on which its driver was started; 0 if that is not known."""
    elastic: ElasticState | None = None
    """Set for a job whose replicas the scheduler chooses."""

    @property
    def max_attempts(self) -> int:
        """The number of its last attempt, if all fail from now on."""
        return self.retries + 1 + sum(one.preempted for one in self.attempts)


class ActorState(StrEnum):
    """PENDING -> ALIVE -> RESTARTING -> ALIVE ... -> DEAD (terminal)."""

    PENDING = "PENDING"
    ALIVE = "ALIVE"
    RESTARTING = "RESTARTING"
    DEAD = "DEAD"


class Owner(Record):
    """The process that created an actor, which does not outlive it unless it is detached.

    ``node_id`` is set for workers (a driver's end is that of its job), ``actor_id`` for those that
    are an actor; the incarnations are those in which it created the actor.
    """

    peer_id: str
    node_id: str = ""
    node_incarnation: Int64 = 0
    actor_id: str = ""
    incarnation: Int64 = 0


class CreateActor(Message):
    """Request to create an actor; ``payload`` (class, arguments, options) is opaque to the gcs.

    ``name`` is unique per namespace; with ``get_if_exists``, which needs a name, the living one is returned
    instead of a conflict. ``max_restarts`` -1 means no limit; before the first of them ``restart_delay_s``
    pass, before the next twice as long, 300 s at most. A ``detached`` actor outlives its job and its
    ``owner``. With ``awaits_arguments`` it is registered, and started once :class:`SupplyArguments` gives
    the payload.
    """

    actor_id: ActorId
    demand: Demand
    class_name: Text
    payload: bytes
    owner: Owner | None = None
    name: Name = ""
    namespace: Name = ""
    detached: bool = False
    get_if_exists: bool = False
    max_restarts: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] = 0
    max_oom_restarts: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] | None = None
    """The same for want of memory, counted apart; None: as many."""
    restart_delay_s: Seconds = 0.0
    max_task_retries: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] = 0
    handle_info: bytes = b""
    awaits_arguments: bool = False
    saves_state: bool = False
    """Whether the class has the hooks that carry its state over a restart."""


class SupplyArguments(Message):
    """The constructor's arguments, which start the actor. ``payload`` as in CreateActor."""

    payload: bytes


class ReportActor(Message):
    """Report by the actor's worker of how the constructor ended, or why the actor ends itself.

    ``incarnation`` fences old workers. ``restart``: it failed, so it starts again if it may.
    """

    state: Annotated[ActorState, stated(enum=["ALIVE", "DEAD"])]
    incarnation: Int64
    worker_id: str = ""
    error: ErrorInfo | None = None
    restart: bool = False
    state_object: str = ""
    """The detached object with the state that it has saved, if that is what it reports."""


class KillActor(Message):
    """Request to end an actor; with ``no_restart`` false it may restart if restarts are left."""

    no_restart: bool = True
    reason: str = "killed by stoker.kill()"


class Actor(Record):
    """A stateful worker as the gcs knows it. ``incarnation`` counts its starts from 0.

    One that a detached actor made is of no job; ``origin_job_id`` is the one that made that.
    """

    actor_id: str
    job_id: str
    class_name: str
    state: ActorState
    origin_job_id: str = ""
    name: str = ""
    namespace: str = ""
    detached: bool = False
    incarnation: int = 0
    restarts: int = 0
    """Of all causes but preemption."""
    oom_restarts: int = 0
    """Those of ``restarts`` for want of memory."""
    max_restarts: int = 0
    max_oom_restarts: int | None = None
    restart_delay_s: float = 0.0
    restart_at_s: float | None = None
    """When it may be placed again, if it is RESTARTING after a pause."""
    max_task_retries: int = 0
    resources: Resources = {}
    node_id: str = ""
    worker_id: str = ""
    lease_id: str = ""
    pid: int = 0
    address: Address | None = None
    created_at_s: float = 0.0
    started_at_s: float | None = None
    ended_at_s: float | None = None
    ran_before_s: float = 0.0
    """How long it ran before its present incarnation."""
    death_cause: ErrorInfo | None = None
    """Why it is dead; of one that started again, why its last process ended."""
    last_alive: int | None = None
    """The latest incarnation before this one that was ALIVE, -1 if none was: those between have run no call.
    None if that is not known."""
    pending_reason: str = ""
    handle_info: bytes = b""
    owner: Owner | None = None
    awaits_arguments: bool = False
    preemptions: int = 0
    """How often its worker was ended for other work; not counted in ``restarts``."""
    saves_state: bool = False
    """Whether its class has the hooks that carry its state over a restart: a drain moves it."""
    state_object: str = ""
    """The detached object with what its ``__stoker_save__`` returned last."""
    saved_at_s: float | None = None
    node_incarnation: int = 0
    """The incarnation of ``node_id`` on which it was placed; 0 if that is not known."""

    def restarts_left(self, *, oom: bool) -> int | None:
        """Return how often it may still be started again, for want of memory or else; None: without limit."""
        limit = self.max_restarts
        if oom and self.max_oom_restarts is not None:
            limit = self.max_oom_restarts
        used = self.oom_restarts if oom else self.restarts - self.oom_restarts
        return None if limit < 0 else max(0, limit - used)


class TaskState(StrEnum):
    """State of an attempt; the last three are terminal."""

    WAITING = "WAITING"
    """An argument is not there yet."""
    QUEUED = "QUEUED"
    """Waits for a lease."""
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows this state."""
        return self in (TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED)


class TaskRecord(Record):
    """Record of one attempt. Reports merge by (task_id, attempt): later states win."""

    task_id: Id
    attempt: Count
    state: TaskState
    job_id: Id
    name: str
    actor_id: str = ""
    parent_task_id: str = ""
    submitted_at_s: Time | None = None
    started_at_s: Time | None = None
    ended_at_s: Time | None = None
    node_id: str = ""
    worker_id: str = ""
    args_nbytes: Int64 = 0
    result_nbytes: Int64 = 0
    error: ErrorInfo | None = None
    demand: Demand | None = None
    waiting_for: str = ""
    owner_id: str = ""
    """The process that submitted it, if that process reported it."""
    reconstructs: str = ""
    """The lost object because of which a task that had ended was executed again, or ''."""
    reconstructions: Count = 0
    """How often the task was executed again because of lost objects, this attempt included."""
    lineage_depth: Count = 0
    """The tasks of the longest chain of results up to this one, itself included, if it was executed again."""
    spans: TaskSpans | None = None
    cpus: Amount = 0.0
    """The CPUs that it held while it ran; 0 for the call of an actor, which holds them itself."""
    gpus: Amount = 0.0
    group_id: str = ""
    """The placement group of which it held these."""


class ReportTasks(Message):
    """A batch of task records; the reply means that they are durable."""

    records: tuple[TaskRecord, ...]


class TaskHistoryStatus(Record):
    """Count of task records that were stored; ``dropped`` must be 0."""

    accepted: int
    dropped: int = 0
