"""The status of this process's tasks, as it is reported to the task history.

Workers report what starts and ends at them. The owner reports the rest: tasks that wait for long, and
attempts whose end no worker saw. It reports those that run for long too, as their worker may be silent.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stoker.exceptions import TaskCancelledError
from stoker.runtime.net.task_events import nbytes_of
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.serialization.exceptions import error_info
from stoker.runtime.tasks.task_spec import PendingTask, Phase
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.task_events import TaskEvents
    from stoker_wire.messages.data import Failed

_REPORT_AFTER_S = 0.1
_REPORT_BATCH = 1000


class TaskStatus:
    """The reporter of this process's tasks. Changes none of them."""

    def __init__(self, peer_id: str, job: JobContext, events: TaskEvents) -> None:
        self._peer_id = peer_id
        self._job = job
        self._events = events
        self._recent: deque[PendingTask] = deque()

    def watch(self, task: PendingTask) -> None:
        """Report a new task later, if it still waits after the time that a start takes (loop thread)."""
        if task.spec.template.history:
            self._recent.append(task)

    def tick(self) -> None:
        """Report the watched tasks that still wait after that time, each once."""
        horizon = time.time() - _REPORT_AFTER_S
        recent, reported = self._recent, 0
        while recent and reported < _REPORT_BATCH and recent[0].submitted_at_s < horizon:
            task = recent.popleft()
            if task.phase is Phase.SENT or task.phase is Phase.ENDED:
                continue  # its worker reports it
            reported += 1
            state = TaskState.WAITING if task.phase is Phase.WAITING else TaskState.QUEUED
            facts = {"demand": task.spec.demand, "waiting_for": task.describe()}
            self._events.add(self.record(task, state, **facts))

    def runs(self, task: PendingTask, for_s: float) -> None:
        """Report that a task runs, which its worker may be too silent to do."""
        if task.spec.template.history:
            started_at_s = time.time() - for_s
            self._events.add(self.record(task, TaskState.RUNNING, started_at_s=started_at_s))

    def ended(self, task: PendingTask, failed: Failed, *, attempt: int | None = None) -> None:
        """Report the end of an attempt (by default the present one) that no worker will report."""
        if not task.spec.template.history:
            return
        cancelled = failed.code == TaskCancelledError.code
        record = self.record(
            task,
            TaskState.CANCELLED if cancelled else TaskState.FAILED,
            attempt=task.attempt if attempt is None else attempt,
            ended_at_s=time.time(),
            error=error_info(failed),
        )
        self._events.add(record)

    def settled(self, task: PendingTask, failed: Failed | None) -> None:
        """Export the span of a call that has a trace context, and is settled."""
        if TRACES.tracer is not None:
            TRACES.tracer.called(
                task.trace,
                task.task_id,
                task.spec.name,
                task.submitted_at_s,
                self._job.job_id,
                task.spec.actor_id,
                failed,
            )

    def record(self, task: PendingTask, state: TaskState, **facts: Any) -> TaskRecord:
        """Return the history's record of a task."""
        facts.setdefault("attempt", task.attempt)
        if task.channel is not None:
            peer = task.channel.peer
            facts.update(node_id=peer.node_id, worker_id=peer.peer_id)
            if not task.spec.actor_id:
                demand = task.spec.demand
                facts["cpus"] = demand.resources.get("CPU", 0.0)
                facts["gpus"] = demand.resources.get("GPU", 0.0)
                facts["group_id"] = demand.strategy.group_id
        return TaskRecord(
            task_id=task.task_id,
            state=state,
            job_id=self._job.job_id,
            name=task.spec.name,
            actor_id=task.spec.actor_id,
            parent_task_id=task.parent_task_id,
            submitted_at_s=task.submitted_at_s,
            args_nbytes=nbytes_of(task.args),
            owner_id=self._peer_id,
            **facts,
        )
