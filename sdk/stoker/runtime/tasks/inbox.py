"""What user threads hand to the loop thread: in turns, so that no thread waits for another's flood.

Each thread has an inbox of its own. The loop takes some of each and goes on with results and with
the scheduler's orders; what is left is taken in its next turn. To leave a task is one atomic step:
a signal may raise between any two, and must not part a thread from the loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.tasks.task_spec import FunctionSpec, PendingTask

_TAKE_TASKS = 500
"""What is taken of one thread's at a time."""


class _ThreadInbox(threading.local):
    """What the calling thread submitted, and its name for each function."""

    def __init__(self, all_inboxes: list[tuple[deque[PendingTask], threading.Thread]]) -> None:
        tasks: deque[PendingTask] = deque()
        all_inboxes.append((tasks, threading.current_thread()))
        self.flows: dict[str, Hashable] = {}
        self.tasks = tasks


class TaskInbox:
    """The tasks that were submitted and not taken in."""

    def __init__(self) -> None:
        self._inboxes: list[tuple[deque[PendingTask], threading.Thread]] = []
        self._mine = _ThreadInbox(self._inboxes)

    def __bool__(self) -> bool:
        return any(tasks for tasks, _ in self._inboxes)

    def fairness_key(self, spec: FunctionSpec) -> Hashable:
        """Name what takes turns with other calls: those of one function by the calling thread."""
        flows = self._mine.flows
        flow = flows.get(spec.function)
        if flow is None:
            flow = flows[spec.function] = (spec.function, threading.get_ident())
        return flow

    def add(self, task: PendingTask) -> None:
        """Leave a task for the loop thread."""
        self._mine.tasks.append(task)

    def take(self) -> Iterator[PendingTask]:
        """Take some of each thread's tasks (loop thread)."""
        for inbox in list(self._inboxes):
            tasks, thread = inbox
            over = not thread.is_alive()  # asked first: what it left comes before its end
            for _ in range(min(len(tasks), _TAKE_TASKS)):
                yield tasks.popleft()
            if over and not tasks:
                self._inboxes.remove(inbox)
