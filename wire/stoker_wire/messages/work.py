"""Jobs, actors, tasks and objects: what users make, and what the history keeps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import (
    Address,
    Asked,
    ErrorInfo,
    Labels,
    Message,
    Record,
    Resources,
    RuntimeEnv,
    Selector,
)

DETACHED_JOB = "job_detached"
"""The job that detached actors and their tasks count for: it never ends, nobody cleans up after it."""


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


class SubmitJob(Message):
    """Run ``entrypoint`` (a shell command) on the cluster as a driver.

    ``job_id`` may be chosen by the caller (submitting the same twice is then a conflict).
    ``resources`` are what the driver process itself needs (default: nothing).
    """

    entrypoint: Annotated[str, msgspec.Meta(min_length=1, max_length=65536, pattern=r"^[^\x00]*$")]
    job_id: str | None = None
    runtime_env: RuntimeEnv = RuntimeEnv()
    metadata: dict[str, str] = {}
    resources: Asked = {}
    label_selector: Selector = {}
    namespace: str | None = None
    name: str = ""


class NodeOutput(Record):
    """What a job wrote into its output folder on one node; ``shared`` if all nodes see the same."""

    node_id: str
    path: str
    files: int
    nbytes: int
    shared: bool = False


class JobOutput(Record):
    """Where the output of a job lies: on nodes that live, the driver's first.

    ``lost`` says of the driver's node, if it is gone, why.
    """

    job_id: str
    nodes: tuple[NodeOutput, ...] = ()
    lost: str = ""


class AttachDriver(Message):
    """A driver process joins the cluster: a new job, or the submitted job that it belongs to."""

    job_id: str | None = None
    entrypoint: str = ""
    hostname: str = ""
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    namespace: str | None = None
    runtime_env: RuntimeEnv = RuntimeEnv()
    metadata: dict[str, str] = {}


class FinishJob(Message):
    """The driver (or its nodelet) says how the job ended, and where it ran: its log lies there."""

    state: JobState
    exit_code: int | None = None
    message: str = ""
    node_id: str = ""


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
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    message: str = ""
    node_id: str = ""
    hostname: str = ""
    pid: int = 0
    lease_id: str = ""


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
    node_incarnation: int = 0
    actor_id: str = ""
    incarnation: int = 0


class CreateActor(Message):
    """Create an actor; ``payload`` (class, arguments, options) is opaque to the gcs.

    ``name`` is unique per namespace; with ``get_if_exists`` the living one is returned instead
    of a conflict. ``max_restarts`` -1 means no limit. A ``detached`` actor outlives its job and its
    ``owner``. With ``awaits_arguments`` it is kept, and started once :class:`SupplyArguments` gives
    the payload.
    """

    actor_id: str
    demand: Demand
    class_name: str
    payload: bytes
    owner: Owner | None = None
    name: str = ""
    namespace: str = ""
    detached: bool = False
    get_if_exists: bool = False
    max_restarts: Annotated[int, msgspec.Meta(ge=-1)] = 0
    max_task_retries: Annotated[int, msgspec.Meta(ge=-1)] = 0
    handle_info: bytes = b""
    awaits_arguments: bool = False


class SupplyArguments(Message):
    """The constructor's arguments are there: start the actor. ``payload`` as in CreateActor."""

    payload: bytes


class ReportActor(Message):
    """The actor's worker tells how the constructor ended, or why the actor ends itself.

    ``incarnation`` fences old workers. ``restart``: it failed, so it starts again if it may.
    """

    state: ActorState
    incarnation: int
    worker_id: str = ""
    error: ErrorInfo | None = None
    restart: bool = False


class KillActor(Message):
    """End an actor; with ``no_restart`` false it may restart if restarts are left."""

    no_restart: bool = True
    reason: str = "killed by stoker.kill()"


class Actor(Record):
    """A stateful worker as the gcs knows it. ``incarnation`` counts its starts from 0."""

    actor_id: str
    job_id: str
    class_name: str
    state: ActorState
    name: str = ""
    namespace: str = ""
    detached: bool = False
    incarnation: int = 0
    restarts: int = 0
    max_restarts: int = 0
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
    death_cause: ErrorInfo | None = None
    """Why it is dead; of one that started again, why its last process ended."""
    pending_reason: str = ""
    handle_info: bytes = b""
    owner: Owner | None = None
    awaits_arguments: bool = False


class TaskState(StrEnum):
    """What an attempt is doing; the last three are terminal."""

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
    """What is known of one attempt. Reports merge by (task_id, attempt): later states win."""

    task_id: str
    attempt: int
    state: TaskState
    job_id: str
    name: str
    actor_id: str = ""
    parent_task_id: str = ""
    submitted_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    node_id: str = ""
    worker_id: str = ""
    args_nbytes: int = 0
    result_nbytes: int = 0
    error: ErrorInfo | None = None
    demand: Demand | None = None
    waiting_for: str = ""
    owner_id: str = ""
    """The process that submitted it, where it was that which reported."""


class ReportTasks(Message):
    """A batch of task records; the reply means that they are durable."""

    records: tuple[TaskRecord, ...]


class TaskHistoryStatus(Record):
    """``dropped`` must be 0."""

    accepted: int
    dropped: int = 0


class ObjectInfo(Record):
    """An object in a node's shared memory, or ``spilled`` from it to the node's disk.

    ``copy_of`` names the object's home if this is a copy that was pulled from there.
    """

    object_id: str
    nbytes: int
    job_id: str = ""
    owner_id: str = ""
    node_id: str = ""
    created_at_s: float = 0.0
    spilled: bool = False
    copy_of: str = ""


class SealObjects(Message):
    """A runtime tells its nodelet which objects it has written to the arena."""

    objects: tuple[ObjectInfo, ...]


class MakeRoom(Message):
    """A runtime wants to write so many bytes and has found the node's shared memory full."""

    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class FreeObjects(Message):
    """The owner no longer needs these."""

    object_ids: tuple[str, ...]


class PullObject(Message):
    """Have a nodelet bring an object into its arena. ``node_id`` and ``url`` are of its home, the
    node where it was made; ``nbytes`` is its length.
    """

    node_id: str
    url: str
    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class FindSources(Message):
    """A nodelet asks an object's home where to pull it from; ``failed`` are nodes that did not do."""

    node_id: str
    url: str
    failed: tuple[str, ...] = ()


class ObjectSource(Record):
    """A node that has an object, or is getting it."""

    node_id: str
    url: str


class ObjectSources(Record):
    """Where to pull an object from, best first; the home is always among them."""

    object: ObjectInfo
    sources: tuple[ObjectSource, ...]


class ReportCopy(Message):
    """A pull of the home's object has ended: with a whole copy on that node, or without."""

    node_id: str
    whole: bool


class ReadyChunks(Record):
    """How many chunks of an object a node has, counted from its start."""

    chunks: int
