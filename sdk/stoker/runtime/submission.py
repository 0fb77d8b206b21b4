"""What user threads hand to the loop thread: in turns, so that no thread waits for another's flood.

Each thread has an inbox of its own. The loop takes some of each and goes on with results and with
the scheduler's orders; what is left is taken in its next turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.calls import FunctionSpec, PendingTask

_TAKE_TASKS = 500
"""What is taken of one thread's at a time."""


class _Inbox(threading.local):
    """What the calling thread submitted, and its name for each function."""

    def __init__(self) -> None:
        self.tasks: deque[PendingTask] = deque()
        self.flows: dict[str, Hashable] = {}


class Submissions:
    """The tasks that were submitted and not taken in."""

    def __init__(self) -> None:
        self._mine = _Inbox()
        self._filled: deque[deque[PendingTask]] = deque()

    def __bool__(self) -> bool:
        return bool(self._filled)

    def flow_of(self, spec: FunctionSpec) -> Hashable:
        """Name what takes turns with other calls: those of one function by the calling thread."""
        flows = self._mine.flows
        flow = flows.get(spec.function)
        if flow is None:
            flow = flows[spec.function] = (spec.function, threading.get_ident())
        return flow

    def add(self, task: PendingTask) -> None:
        """Leave a task for the loop thread."""
        inbox = self._mine.tasks
        inbox.append(task)
        if len(inbox) == 1:
            # It may be listed already, by the loop that takes from it now: that does no harm.
            self._filled.append(inbox)

    def take(self) -> Iterator[PendingTask]:
        """Take some of each thread's tasks (loop thread)."""
        for _ in range(len(self._filled)):
            inbox = self._filled.popleft()
            for _ in range(min(len(inbox), _TAKE_TASKS)):
                yield inbox.popleft()
            if inbox:
                self._filled.append(inbox)
