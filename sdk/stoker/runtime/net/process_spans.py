"""The spans that this process's code has named outside of tasks: a driver's, or an actor's constructor's.

They are recorded in the task history, as attempts of a task of their own, for that is where a timeline looks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker.runtime.process.tracing.spans import MAX_SPANS, SPANS
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.process.identity import Identity

DRIVER, WORKER = "(driver)", "(worker)"
"""The names of these records: no function is called so."""
_EVERY_S = 0.5


class ProcessSpans:
    """The recorder of this process's own spans (loop thread)."""

    def __init__(self, identity: Identity, job: JobContext, events: TaskEvents) -> None:
        self._identity = identity
        self._job = job
        self._events = events
        self._task_id = ""
        self._records = 0
        self._recorded_at_s = time.monotonic()

    def tick(self) -> None:
        """Record what has come, if it is much or a while has passed."""
        if not SPANS.own.rows:
            return
        late = time.monotonic() - self._recorded_at_s > _EVERY_S
        if late or len(SPANS.own.rows) > MAX_SPANS // 2:
            self.record()

    def record(self) -> None:
        """Record what has come."""
        spans = SPANS.take_own() if self._job.job_id else None
        self._recorded_at_s = time.monotonic()
        if spans is None or not spans.items:
            return
        self._task_id = self._task_id or new_id(Prefix.TASK)
        lease, node = self._job.lease, self._identity.node
        self._events.add(
            TaskRecord(
                task_id=self._task_id,
                attempt=self._records,
                state=TaskState.FINISHED,
                job_id=self._job.job_id,
                name=WORKER if self._identity.is_worker else DRIVER,
                actor_id=lease.actor_id if lease is not None else "",
                started_at_s=min(one.started_at_s for one in spans.items),
                ended_at_s=max(one.ended_at_s for one in spans.items),
                node_id=node.node_id if node is not None else "",
                worker_id=self._identity.peer_id,
                owner_id=self._identity.peer_id,
                spans=spans,
            )
        )
        self._records += 1
