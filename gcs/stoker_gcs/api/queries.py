"""Query strings of the gcs's routes, as types: OpenAPI and the checks come from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.common import Message
from stoker_wire.messages.control import ListQuery, Position
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from enum import StrEnum

WaitS = Annotated[float, msgspec.Meta(ge=0, le=60)]


class WatchQuery(ListQuery):
    """A list that can be watched: with ``watch``, events after ``since`` instead of a page."""

    watch: bool = False
    since: Position = 0


class NodeQuery(WatchQuery):
    """Filters of nodes. ``state``: ALIVE, SUSPECT, DEAD; several are separated by commas."""

    state: str = ""


class JobQuery(WatchQuery):
    """Filters of jobs. ``state``: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED; several with commas."""

    state: str = ""
    namespace: str = ""


class ActorQuery(WatchQuery):
    """Filters of actors. ``state``: PENDING, ALIVE, RESTARTING, DEAD; several are separated by commas."""

    job_id: str = ""
    state: str = ""
    name: str = ""
    namespace: str = ""
    node_id: str = ""
    class_name: str = ""


class TaskQuery(ListQuery):
    """Filters of task attempts.

    ``state``: WAITING, QUEUED, RUNNING, FINISHED, FAILED, CANCELLED; several are separated by commas.
    """

    job_id: str = ""
    state: str = ""
    name: str = ""
    node_id: str = ""
    actor_id: str = ""


class ObjectQuery(ListQuery):
    """Filters of objects."""

    node_id: str = ""
    job_id: str = ""


class WorkerQuery(ListQuery):
    """Filters of workers. ``state``: STARTING, IDLE, LEASED, DEAD; several are separated by commas."""

    node_id: str = ""
    job_id: str = ""
    actor_id: str = ""
    state: str = ""


class WaitQuery(Message):
    """``wait_s``: how long the reply may wait for what was asked."""

    wait_s: WaitS = 0.0


class KvPutQuery(Message):
    """``if_absent``: leave a key that exists as it is (409)."""

    if_absent: bool = False


class KvListQuery(ListQuery):
    """Keys that start with ``prefix``."""

    prefix: str = ""


class LogQuery(Message):
    """``follow`` goes on with new lines; ``since`` is a line's cursor; ``tail``: only the last so many."""

    follow: bool = False
    since: Position = 0
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    worker_id: str = ""


class OutputQuery(Message):
    """``node_id``: the output on this node; empty: on that of the job's driver."""

    node_id: str = ""


class ExitQuery(Message):
    """What a driver says of its end, should its exit code say that it failed."""

    message: Annotated[str, msgspec.Meta(max_length=4000)] = ""


class ResignQuery(Message):
    """Who gives up leading."""

    holder: str


class Leave(Message):
    """A nodelet's good-bye; ``incarnation`` fences one that comes late."""

    incarnation: int | None = None
    reason: str = ""


def states(text: str, known: type[StrEnum]) -> str | tuple[str, ...]:
    """Return the condition of a filter by state; BadRequestError names the nearest valid one."""
    if not text:
        return ""
    found = tuple(text.split(","))
    names = [state.value for state in known]
    for name in found:
        if name not in names:
            raise BadRequestError(
                f"state: {name!r} is none\n{suggestion(name, names)}", field="state"
            )
    return found[0] if len(found) == 1 else found
