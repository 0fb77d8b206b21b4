"""The inbox of submitted tasks, from user threads to the loop thread.

It is fair: each thread has a queue of its own, and the loop takes some of each before it goes on with
results and with the scheduler's orders; the rest is taken in its next turn. To add a task is one atomic
step: a signal may raise between any two, and must not leave a task that the loop never sees.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.tasks.task_spec import FunctionSpec, PendingTask

_TAKE_TASKS = 500
"""How many tasks of one thread are taken at a time."""


class _ThreadInbox(threading.local):
    """The tasks that the calling thread submitted, and its fairness key for each function."""

    def __init__(self, all_inboxes: list[tuple[deque[PendingTask], threading.Thread]]) -> None:
        tasks: deque[PendingTask] = deque()
        all_inboxes.append((tasks, threading.current_thread()))
        self.fairness_keys: dict[str, Hashable] = {}
        self.tasks = tasks


class TaskInbox:
    """The tasks that user threads submitted and the loop thread has not taken."""

    def __init__(self) -> None:
        self._inboxes: list[tuple[deque[PendingTask], threading.Thread]] = []
        self._local = _ThreadInbox(self._inboxes)

    def __bool__(self) -> bool:
        for tasks, _ in self._inboxes:  # noqa: SIM110 (called for each call: any() costs a generator)
            if tasks:
                return True
        return False

    def fairness_key(self, spec: FunctionSpec) -> Hashable:
        """Return the key of the calls that share turns: those of one function by the calling thread."""
        fairness_keys = self._local.fairness_keys
        key = fairness_keys.get(spec.function)
        if key is None:
            key = fairness_keys[spec.function] = (spec.function, threading.get_ident())
        return key

    def add(self, task: PendingTask) -> None:
        """Add a task for the loop thread."""
        self._local.tasks.append(task)

    def take(self) -> Iterator[PendingTask]:
        """Take some of each thread's tasks (loop thread)."""
        for inbox in list(self._inboxes):
            tasks, thread = inbox
            if tasks:
                for _ in range(min(len(tasks), _TAKE_TASKS)):
                    yield tasks.popleft()
            elif not thread.is_alive() and not tasks:  # its last tasks were added before its end
                self._inboxes.remove(inbox)
