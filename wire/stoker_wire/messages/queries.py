"""Query strings (and one small body) of the gcs's routes, as types.

Decoding, its error messages and the OpenAPI document come from them. Only routes of the gcs read
them; ``GET /v1/events`` has :class:`stoker_wire.messages.events.EventQuery`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import NodeState, WorkerState
from stoker_wire.messages.common import MAX_TIME, Count, Int64, Message, Time, states_rule
from stoker_wire.messages.control import ListQuery, Position, TtlS, WaitS
from stoker_wire.messages.groups import GroupState
from stoker_wire.messages.work import ActorState, JobState, TaskState


class WatchQuery(ListQuery):
    """A list that can be watched: with ``watch``, events after ``since`` instead of a page."""

    watch: bool = False
    since: Position = 0


class NodeQuery(WatchQuery):
    """Filters of nodes. ``state``: ALIVE, SUSPECT, DEAD; several are separated by commas."""

    state: Annotated[str, states_rule(NodeState)] = ""


class JobQuery(WatchQuery):
    """Filters of jobs. ``state``: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED; several with commas.

    ``schedule``: those that a schedule of this name has started.
    """

    state: Annotated[str, states_rule(JobState)] = ""
    namespace: str = ""
    schedule: str = ""


class ActorQuery(WatchQuery):
    """Filters of actors. ``state``: PENDING, ALIVE, RESTARTING, DEAD; several are separated by commas."""

    job_id: str = ""
    state: Annotated[str, states_rule(ActorState)] = ""
    name: str = ""
    namespace: str = ""
    node_id: str = ""
    class_name: str = ""


class GroupQuery(WatchQuery):
    """Filters of placement groups.

    ``state``: PENDING, CREATED, RESCHEDULING, REMOVED; several are separated by commas.
    """

    job_id: str = ""
    state: Annotated[str, states_rule(GroupState)] = ""
    name: str = ""
    namespace: str = ""


class ScheduleQuery(WatchQuery):
    """A page of schedules, by their names."""


class QueueQuery(WatchQuery):
    """Filters of queues: those right below ``parent``."""

    parent: str = ""


class TaskQuery(ListQuery):
    """Filters of task attempts.

    ``state``: WAITING, QUEUED, RUNNING, FINISHED, FAILED, CANCELLED; several are separated by commas.
    With ``watch`` the attempts that match come as lines, and again with each later state.
    """

    job_id: str = ""
    state: Annotated[str, states_rule(TaskState)] = ""
    name: str = ""
    node_id: str = ""
    actor_id: str = ""
    watch: bool = False


class ActivityQuery(Message):
    """A choice of what was under way between two times, of one job if it is named; in the order of its end.

    ``cursor``: the ``next_cursor`` of the page before.
    """

    job_id: str = ""
    since_s: Time = 0.0
    until_s: Time = MAX_TIME
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    cursor: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{0,15}$")] = ""


class ObjectQuery(ListQuery):
    """Filters of objects."""

    node_id: str = ""
    job_id: str = ""


class WorkerQuery(ListQuery):
    """Filters of workers. ``state``: STARTING, IDLE, LEASED, DEAD; several are separated by commas."""

    node_id: str = ""
    job_id: str = ""
    actor_id: str = ""
    state: Annotated[str, states_rule(WorkerState)] = ""


class WaitQuery(Message):
    """``wait_s``: for how long the reply may be held back until the condition of the route is met."""

    wait_s: WaitS = 0.0


class KvPutQuery(Message):
    """Conditions, and when the key expires: as of :class:`stoker_wire.messages.control.KvPut`."""

    if_absent: bool = False
    if_revision: Position | None = None
    ttl_s: TtlS | None = None


class KvDeleteQuery(Message):
    """``if_revision``: leave a key whose last change was another one as it is (409)."""

    if_revision: Position | None = None


class KvListQuery(WatchQuery):
    """Keys that start with ``prefix``."""

    prefix: str = ""


class KernelsQuery(ListQuery):
    """Measurements on devices whose names start with ``device``."""

    device: Annotated[str, msgspec.Meta(max_length=200)] = ""


class LogQuery(Message):
    """``follow``: go on with new lines; ``since``: the cursor of a line; ``tail``: only the last lines.

    ``attempt``: that of a job which was retried (0: its last one).
    """

    follow: bool = False
    since: Position = 0
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    worker_id: str = ""
    attempt: Count = 0


class OutputQuery(Message):
    """``node_id``: the output on this node; empty: on that of the job's driver."""

    node_id: str = ""


class DriverExitQuery(Message):
    """``message``: why the driver ended, for an exit code that is a failure."""

    message: Annotated[str, msgspec.Meta(max_length=4000)] = ""


class ResignQuery(Message):
    """``holder``: the leader that resigns."""

    holder: str


class Leave(Message):
    """Deregistration of a node; ``incarnation`` fences one that arrives late."""

    incarnation: Int64 | None = None
    reason: str = ""
