"""The task that the calling thread or coroutine runs.

Set by the worker around user code; a context variable, so that coroutines and copied contexts see theirs.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class TaskInfo(NamedTuple):
    """The task that runs now."""

    task_id: str
    name: str
    attempt: int
    actor_id: str = ""
    cell: str = ""
    """The notebook's cell that its call is of."""
    trace: str = ""
    """The trace context that its call carries, '' for none."""


current_task: ContextVar[TaskInfo | None] = ContextVar("stoker_task", default=None)


def current_task_id() -> str:
    """Return the id of the task that the calling thread or coroutine runs, or ''."""
    info = current_task.get()
    return info.task_id if info is not None else ""
