"""What can be said of tasks that wait: to the history, to a timeout's message, to ``explain``."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stoker.exceptions import TaskCancelledError
from stoker.runtime.net.task_events import nbytes_of
from stoker.runtime.serialization.exceptions import info_of
from stoker.runtime.tasks.task_spec import PendingTask, Phase
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.data import Failed

_REPORT_AFTER_S = 0.1
_REPORT_BATCH = 1000


def table_sizes(runtime: Runtime) -> dict[str, int]:
    """Return how much this process holds of what comes and goes, by table (for tests and people)."""
    borrowing, execution = runtime.objects.borrowing, runtime.execution
    loans = borrowing.loans
    sizes = {
        "objects": len(runtime.objects.table) - len(runtime.actors.lives),
        "lent": sum(len(theirs) for theirs in loans.lent.values()),
        "borrowed": sum(len(mine) for mine in loans.borrowed.values()),
        "to announce": len(loans.fresh),
        "to return": len(loans.returning),
        "unacknowledged": len(borrowing.unacknowledged),
        "pending tasks": len(runtime.tasks.pending),
        "queued tasks": sum(len(q.ready) for q in runtime.tasks.queues.values()),
        "open calls": sum(len(x.open) for x in runtime.actors.all_links()),
    }
    if execution is not None:
        sizes |= {
            "running": len(execution.running),
            "unstarted": len(execution.unstarted),
            "escaped": len(execution.escaped),
            "credits": len(execution.credits),
        }
    return sizes


class Reports:
    """Reads the pending tasks of this process; changes none."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._fresh: deque[PendingTask] = deque()

    def watch(self, task: PendingTask) -> None:
        """Look at a new task again once it has had the time to start (loop thread)."""
        if task.spec.template.history:
            self._fresh.append(task)

    def tick(self) -> None:
        """Report the tasks that still wait after that time, each once."""
        horizon = time.time() - _REPORT_AFTER_S
        fresh, reported = self._fresh, 0
        while fresh and reported < _REPORT_BATCH and fresh[0].submitted_at_s < horizon:
            task = fresh.popleft()
            if task.phase is Phase.SENT or task.phase is Phase.ENDED:
                continue  # whoever has it reports it
            reported += 1
            state = TaskState.WAITING if task.phase is Phase.WAITING else TaskState.QUEUED
            facts = {"demand": task.spec.demand, "waiting_for": self.describe(task)}
            self._runtime.history.add(self.record(task, state, **facts))

    def ended(self, task: PendingTask, failed: Failed, *, attempt: int | None = None) -> None:
        """Report an attempt (the present one by default) whose end no worker will report."""
        if not task.spec.template.history:
            return
        cancelled = failed.code == TaskCancelledError.code
        record = self.record(
            task,
            TaskState.CANCELLED if cancelled else TaskState.FAILED,
            attempt=task.attempt if attempt is None else attempt,
            ended_at_s=time.time(),
            error=info_of(failed),
        )
        self._runtime.history.add(record)

    def record(self, task: PendingTask, state: TaskState, **facts: Any) -> TaskRecord:
        """Return what the history keeps of a task."""
        facts.setdefault("attempt", task.attempt)
        if task.line is not None:
            peer = task.line.peer
            facts.update(node_id=peer.node_id, worker_id=peer.peer_id)
        return TaskRecord(
            task_id=task.task_id,
            state=state,
            job_id=self._runtime.job_id,
            name=task.spec.name,
            actor_id=task.spec.actor_id,
            parent_task_id=task.parent_task_id,
            submitted_at_s=task.submitted_at_s,
            args_nbytes=nbytes_of(task.args),
            owner_id=self._runtime.identity.peer_id,
            **facts,
        )

    def describe(self, task: PendingTask) -> str:
        """Say what a task waits for, in words."""
        if task.spec.actor_id:
            return self._runtime.actors.describe(task)
        match task.phase:
            case Phase.NEW:
                return "it is being taken in"
            case Phase.WAITING:
                missing = [d.id for d in task.deps if d._entry.place is None]
                if not missing:
                    return "it waits for its next attempt"
                if len(missing) == 1:
                    return f"it waits for its argument {missing[0]}"
                return f"it waits for {len(missing)} arguments, the first is {missing[0]}"
            case Phase.QUEUED:
                return self._runtime.tasks.leases.describe(task.spec.demand_key)
            case Phase.REGISTERING:
                return "its function is being stored in the gcs"
            case Phase.SENT:
                where = task.line.peer.peer_id if task.line is not None else "a worker"
                return f"it was sent to worker {where} and has not finished"
        return "it has ended"

    def describe_entry(self, entry: Entry) -> str:
        """Say what an unsettled object waits for."""
        task = entry.task
        if isinstance(task, PendingTask):
            return f"{entry.object_id} of {task.spec.name} ({task.task_id}): {self.describe(task)}"
        owner = entry.owner
        return (
            f"{entry.object_id}: its owner {owner.peer_id if owner else 'here'} has not made it yet"
        )
