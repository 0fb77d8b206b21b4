"""The catalogue of events: every kind that the gcs writes into its log, and the payload of each.

The gcs alone emits; schedulers, nodelets, runtimes and the command line follow ``GET /v1/events``.
The catalogue exists so that writers and readers cannot disagree: a test proves that each kind has an
emitter and a payload type. Kinds travel as text (:attr:`Event.kind`), so that a reader can meet one
of a newer gcs. The kinds ``bookmark`` and ``error`` belong to the stream of a watch, not to
the log (:mod:`stoker_wire.http.server.watch`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.cluster import Node, NodeState, WorkerExit
from stoker_wire.messages.common import Message, Record, stated, states_rule
from stoker_wire.messages.control import Event, Leader, ListQuery, Position, Token
from stoker_wire.messages.elastic import GenerationTurn
from stoker_wire.messages.groups import GroupState, PlacementGroup
from stoker_wire.messages.node_api import EnvironmentBuild
from stoker_wire.messages.objects import DetachedObject, DetachedState
from stoker_wire.messages.queues import Queue
from stoker_wire.messages.schedules import Schedule
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    Job,
    JobState,
    SlowRank,
    SlowTask,
    TaskRecord,
    TaskState,
)

R = TypeVar("R", bound=Record)


class EventKind(StrEnum):
    """``<entity>.<past tense>``. The subject is the entity's id unless its kind says otherwise."""

    NODE_REGISTERED = "node.registered"
    NODE_SUSPECTED = "node.suspected"
    NODE_RECOVERED = "node.recovered"
    NODE_WARMED = "node.warmed"
    """The kernels in the node's cache changed."""
    NODE_CORDONED = "node.cordoned"
    """Nothing more is placed on it."""
    NODE_UNCORDONED = "node.uncordoned"
    NODE_TAINTED = "node.tainted"
    """Its taints changed."""
    NODE_PRESSED = "node.pressed"
    """It is short of memory or disk, or so in another way: nothing more is placed on it."""
    NODE_RELIEVED = "node.relieved"
    """It is short of nothing any more."""
    NODE_DRAINING = "node.draining"
    """It is to be emptied; or another node takes over its objects."""
    NODE_DRAINED = "node.drained"
    """It was emptied, and has left."""
    NODE_DIED = "node.died"
    NODE_DELETED = "node.deleted"
    """The record of a dead node is gone: none of it is in use any more."""
    GPU_QUARANTINED = "gpu.quarantined"
    """No lease gets some GPU of the node any more. Subject: the node's id."""
    GPU_RELEASED = "gpu.released"
    """A quarantined GPU of the node is in use again. Subject: the node's id."""
    JOB_SUBMITTED = "job.submitted"
    JOB_DELAYED = "job.delayed"
    """Its driver waits for a lease, for another reason than before."""
    JOB_STARTED = "job.started"
    JOB_CHANGED = "job.changed"
    """The driver attached to a job that had started already."""
    JOB_HINTED = "job.hinted"
    """An elastic job has said something new of itself, or stated its limits."""
    JOB_SCALED = "job.scaled"
    """An elastic job was offered replicas, has others than before, or an offer is void."""
    GENERATION_TURNED = "generation.turned"
    """The generations of an elastic trainer took a turn: one formed, or was resized. Subject: its job."""
    JOB_RETRYING = "job.retrying"
    """An attempt failed, and another follows."""
    JOB_FINISHED = "job.finished"
    JOB_DELETED = "job.deleted"
    """The record of a job that had ended is gone."""
    ACTOR_CREATED = "actor.created"
    ACTOR_SUPPLIED = "actor.supplied"
    """The arguments of its constructor arrived."""
    ACTOR_DELAYED = "actor.delayed"
    """It waits for a lease, for another reason than before."""
    ACTOR_PLACED = "actor.placed"
    ACTOR_STARTED = "actor.started"
    ACTOR_SAVED = "actor.saved"
    ACTOR_RESTARTING = "actor.restarting"
    ACTOR_DIED = "actor.died"
    GROUP_CREATED = "placement_group.created"
    GROUP_DELAYED = "placement_group.delayed"
    """It waits for room, for another reason than before."""
    GROUP_PLACED = "placement_group.placed"
    GROUP_RESCHEDULING = "placement_group.rescheduling"
    GROUP_SHRUNK = "placement_group.shrunk"
    """Some bundles left it for good."""
    GROUP_REMOVED = "placement_group.removed"
    OBJECT_CREATED = "object.created"
    """A detached object: its name and its bytes are reserved, or it is there."""
    OBJECT_STORED = "object.stored"
    """Other nodes than before have the detached object."""
    OBJECT_LOST = "object.lost"
    OBJECT_FREED = "object.freed"
    QUEUE_CREATED = "queue.created"
    """Subject: the queue's name."""
    QUEUE_CHANGED = "queue.changed"
    QUEUE_REMOVED = "queue.removed"
    SCHEDULE_CREATED = "schedule.created"
    """Subject: the schedule's name."""
    SCHEDULE_CHANGED = "schedule.changed"
    """It was paused, or resumed."""
    SCHEDULE_RAN = "schedule.ran"
    SCHEDULE_SKIPPED = "schedule.skipped"
    """Its time came, and no job was submitted."""
    SCHEDULE_DELETED = "schedule.deleted"
    WORKER_EXITED = "worker.exited"
    ENVIRONMENT_INSTALLING = "environment.installing"
    """A node installs what workers of a runtime environment need. Subject: the id of the job for which."""
    ENVIRONMENT_READY = "environment.ready"
    ENVIRONMENT_FAILED = "environment.failed"
    TASK_SLOW = "task.slow"
    """A task runs much longer than its function does (the setting ``slow_task_stacks``)."""
    RANK_SLOW = "rank.slow"
    """A rank of a job is slower than the others. Subject: its node's id."""
    KV_PUT = "kv.put"
    """Subject: ``namespace/key``. The event's number is the key's revision."""
    KV_DELETED = "kv.deleted"
    """It was deleted, or has expired."""
    LEADER_ELECTED = "leader.elected"
    """Subject: the name that is led (scheduler, gcs)."""
    TOKEN_CREATED = "token.created"
    TOKEN_REVOKED = "token.revoked"
    TOKEN_USED = "token.used"
    """A machine got the cluster's secret by a join token."""
    SECRET_ROTATED = "secret.rotated"
    """Other secrets than before are in use. Subject: the name of the one that signs."""
    AUDIT_REFUSED = "audit.refused"
    """Requests were refused that came within a while from one sender. Subject: the sender."""
    RECORDS_REMOVED = "records.removed"
    """Actors or placement groups that had ended left, by retention or with their job.

    Subject: which of the two.
    """


KV_INLINE_NBYTES = 1024
"""A value that is larger is not in the event of its change, so that the log stays small."""


class KvChange(Record):
    """A key that was set, or removed (``deleted``; ``expired`` if because its time was over).

    ``value`` is what it was set to, or null if that has more than 1024 bytes.
    """

    namespace: str
    key: str
    nbytes: int = 0
    value: bytes | None = None
    expires_at_s: float | None = None
    deleted: bool = False
    expired: bool = False


class SecretsInUse(Record):
    """The names of the cluster's secrets (:class:`stoker_wire.messages.control.SecretStatus`)."""

    signs: str
    accepts: tuple[str, ...]


class Refusals(Record):
    """Requests of one sender that were refused alike: how many, and the newest ``route`` and ``message``."""

    code: str
    count: int
    route: str
    message: str
    first_at_s: float
    last_at_s: float


class RemovedRecords(Record):
    """The ids of records that left together: ``kind`` is the list that they were in."""

    kind: str
    ids: tuple[str, ...]


Payload: TypeAlias = (
    Node
    | Job
    | Actor
    | PlacementGroup
    | DetachedObject
    | Queue
    | Schedule
    | WorkerExit
    | EnvironmentBuild
    | SlowRank
    | GenerationTurn
    | SlowTask
    | KvChange
    | Leader
    | Token
    | SecretsInUse
    | Refusals
    | RemovedRecords
)

PAYLOADS: dict[EventKind, type[Payload]] = {
    EventKind.NODE_REGISTERED: Node,
    EventKind.NODE_SUSPECTED: Node,
    EventKind.NODE_RECOVERED: Node,
    EventKind.NODE_WARMED: Node,
    EventKind.NODE_CORDONED: Node,
    EventKind.NODE_UNCORDONED: Node,
    EventKind.NODE_TAINTED: Node,
    EventKind.NODE_PRESSED: Node,
    EventKind.NODE_RELIEVED: Node,
    EventKind.NODE_DRAINING: Node,
    EventKind.NODE_DRAINED: Node,
    EventKind.NODE_DIED: Node,
    EventKind.NODE_DELETED: Node,
    EventKind.GPU_QUARANTINED: Node,
    EventKind.GPU_RELEASED: Node,
    EventKind.JOB_SUBMITTED: Job,
    EventKind.JOB_DELAYED: Job,
    EventKind.JOB_STARTED: Job,
    EventKind.JOB_CHANGED: Job,
    EventKind.JOB_HINTED: Job,
    EventKind.JOB_SCALED: Job,
    EventKind.JOB_RETRYING: Job,
    EventKind.JOB_FINISHED: Job,
    EventKind.JOB_DELETED: Job,
    EventKind.ACTOR_CREATED: Actor,
    EventKind.ACTOR_SUPPLIED: Actor,
    EventKind.ACTOR_DELAYED: Actor,
    EventKind.ACTOR_PLACED: Actor,
    EventKind.ACTOR_STARTED: Actor,
    EventKind.ACTOR_SAVED: Actor,
    EventKind.ACTOR_RESTARTING: Actor,
    EventKind.ACTOR_DIED: Actor,
    EventKind.GROUP_CREATED: PlacementGroup,
    EventKind.GROUP_DELAYED: PlacementGroup,
    EventKind.GROUP_PLACED: PlacementGroup,
    EventKind.GROUP_RESCHEDULING: PlacementGroup,
    EventKind.GROUP_SHRUNK: PlacementGroup,
    EventKind.GROUP_REMOVED: PlacementGroup,
    EventKind.OBJECT_CREATED: DetachedObject,
    EventKind.OBJECT_STORED: DetachedObject,
    EventKind.OBJECT_LOST: DetachedObject,
    EventKind.OBJECT_FREED: DetachedObject,
    EventKind.QUEUE_CREATED: Queue,
    EventKind.QUEUE_CHANGED: Queue,
    EventKind.QUEUE_REMOVED: Queue,
    EventKind.SCHEDULE_CREATED: Schedule,
    EventKind.SCHEDULE_CHANGED: Schedule,
    EventKind.SCHEDULE_RAN: Schedule,
    EventKind.SCHEDULE_SKIPPED: Schedule,
    EventKind.SCHEDULE_DELETED: Schedule,
    EventKind.WORKER_EXITED: WorkerExit,
    EventKind.ENVIRONMENT_INSTALLING: EnvironmentBuild,
    EventKind.ENVIRONMENT_READY: EnvironmentBuild,
    EventKind.ENVIRONMENT_FAILED: EnvironmentBuild,
    EventKind.TASK_SLOW: SlowTask,
    EventKind.RANK_SLOW: SlowRank,
    EventKind.GENERATION_TURNED: GenerationTurn,
    EventKind.KV_PUT: KvChange,
    EventKind.KV_DELETED: KvChange,
    EventKind.LEADER_ELECTED: Leader,
    EventKind.TOKEN_CREATED: Token,
    EventKind.TOKEN_REVOKED: Token,
    EventKind.TOKEN_USED: Token,
    EventKind.SECRET_ROTATED: SecretsInUse,
    EventKind.AUDIT_REFUSED: Refusals,
    EventKind.RECORDS_REMOVED: RemovedRecords,
}
"""The type of each kind's payload: the entity's record as it is after the change."""

# By entity, so that a kind of a newer gcs (``node.renamed``) still updates those who follow nodes.
_TYPE_OF_ENTITY: dict[str, type[Payload]] = {
    kind.partition(".")[0]: type_ for kind, type_ in PAYLOADS.items()
}


def payload_of(event: Event) -> Payload:
    """Decode the payload of an event; ValueError for a kind that this version does not know."""
    return _record(event, PAYLOADS[EventKind(event.kind)])


def payload_as(event: Event, type_: type[R]) -> R | None:
    """Decode the payload of an event whose entity has a ``type_``; None for every other entity."""
    if _TYPE_OF_ENTITY.get(event.kind.partition(".")[0]) is not type_:
        return None
    return _record(event, type_)


def _record(event: Event, type_: type[R]) -> R:
    return convert_known(event.payload, type_)


class EventQuery(ListQuery):
    """``kind`` and ``subject`` are prefixes, ``by`` names of people; several separated by commas."""

    watch: bool = False
    since: Position = 0
    kind: Annotated[
        str,
        msgspec.Meta(
            description="Prefixes of kinds, separated by commas. The kinds: "
            + ", ".join(EventKind)
            + ".",
            examples=[kind.value for kind in EventKind],
        ),
    ] = ""
    subject: str = ""
    by: str = ""


class PastKind(StrEnum):
    """The kinds of what ``GET /v1/state`` gives."""

    NODES = "nodes"
    JOBS = "jobs"
    ACTORS = "actors"
    PLACEMENT_GROUPS = "placement_groups"
    DETACHED_OBJECTS = "detached_objects"
    QUEUES = "queues"
    SCHEDULES = "schedules"
    TASKS = "tasks"


_STATES = (
    *(NodeState, JobState, ActorState, GroupState, DetachedState, TaskState),
    *("STOPPED", "RUNNING", "PAUSED", "ACTIVE"),
)


class StateQuery(Message):
    """A moment, and what of it to show.

    ``at`` is a sequence number of the event log, a time in ISO 8601, or seconds since the epoch (a number
    with a point, or too large for a sequence number); empty means now. Without ``kind`` the reply has the
    first ``limit`` records of each kind but tasks, and counts of these; with it, one page of that kind.
    ``state`` (one that the kind has), ``job_id`` and ``node_id`` are filters of records; commas separate
    several states. ``count`` asks for counts of tasks, too, for which the whole history is read.
    """

    at: Annotated[
        str,
        msgspec.Meta(max_length=64, examples=["1200", "2026-05-04T12:00:00Z"]),
        stated(format="moment"),
    ] = ""
    kind: PastKind | None = None
    state: Annotated[str, states_rule(*_STATES)] = ""
    job_id: str = ""
    node_id: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    cursor: str = ""
    count: bool = False


class PastState(Record):
    """The cluster after the event ``seq``, which came at ``at_s``, as the event log tells it.

    ``counts`` are by kind and state. ``more`` names the kinds of which there are more records than the
    reply has; the next page of one kind begins at ``next_cursor``. Tasks are as the times of their attempts
    say, and ``at_s`` of a page of them is their time. ``oldest_seq`` and ``oldest_at_s`` are the earliest
    moment that can be asked for; null is the beginning. ``tasks_since_s`` is that of tasks: of before,
    retention has removed some, so none are counted.
    """

    seq: int
    at_s: float
    oldest_seq: int
    oldest_at_s: float | None = None
    tasks_since_s: float | None = None
    counts: dict[str, dict[str, int]] = {}
    nodes: tuple[Node, ...] = ()
    jobs: tuple[Job, ...] = ()
    actors: tuple[Actor, ...] = ()
    placement_groups: tuple[PlacementGroup, ...] = ()
    detached_objects: tuple[DetachedObject, ...] = ()
    queues: tuple[Queue, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    tasks: tuple[TaskRecord, ...] = ()
    more: tuple[str, ...] = ()
    next_cursor: str = ""


class StoryQuery(Message):
    """The most lines of a story; beyond, the oldest are left out."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200


class StoryLine(Record):
    """A moment of a story: what happened to ``about``, and ``why`` if that is known.

    ``seq`` is the number of its event; what is known of the task history alone has none.
    """

    at_s: float
    kind: str
    about: str
    text: str
    why: str = ""
    seq: int | None = None


class Story(Record):
    """The events of one thing and of what it touched, in order.

    ``more``: older lines, or things, were left out. ``since_s``: of what was before, the events have left by
    retention.
    """

    id: str
    kind: str
    name: str = ""
    state: str = ""
    lines: tuple[StoryLine, ...] = ()
    more: bool = False
    since_s: float | None = None
