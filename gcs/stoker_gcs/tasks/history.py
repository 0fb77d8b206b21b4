"""The task history: durable before the reply, merged by attempt, and closed when a job ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs import schema
from stoker_gcs.store.rows import task_of
from stoker_gcs.tasks.merge import inferred_end
from stoker_wire.errors import NotFoundError
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import TaskHistoryStatus, TaskRecord, TaskState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.jobs.ledger import JobLedger
    from stoker_gcs.store.changes import Condition
    from stoker_gcs.truth import Truth
    from stoker_wire.messages.control import ListQuery

OPEN = (TaskState.WAITING.value, TaskState.QUEUED.value, TaskState.RUNNING.value)
JOB_ENDED = "its job ended before it did"


class TaskHistory:
    """See the module."""

    def __init__(self, truth: Truth, ledger: JobLedger) -> None:
        self._truth = truth
        self._ledger = ledger
        self.accepted = 0

    async def report(self, records: tuple[TaskRecord, ...]) -> TaskHistoryStatus:
        """Store a batch. An attempt of a job that has ended is not open any more."""
        ended: dict[str, bool] = {}
        for record in records:
            if record.job_id not in ended and not record.state.terminal:
                ended[record.job_id] = await self._ledger.has_ended(record.job_id)
        now = self._truth.now()
        if any(ended.values()):
            records = tuple(
                inferred_end(record, JOB_ENDED, now)
                if not record.state.terminal and ended[record.job_id]
                else record
                for record in records
            )
        await self._truth.journal.put_tasks(records)
        self.accepted += len(records)
        return TaskHistoryStatus(accepted=len(records))

    async def page(self, query: ListQuery, where: Mapping[str, Condition]) -> Page[TaskRecord]:
        """One page of attempts, in the order of their ids."""
        given = {name: value for name, value in where.items() if value not in ("", ())}
        rows, cursor = await self._truth.rows(schema.TASKS, query, given)
        items = tuple(task_of(row) for row in rows)
        return Page(items=items, next_cursor=cursor, seq=self._truth.log.last)

    async def attempts(self, task_id: str) -> list[TaskRecord]:
        """All attempts of a task, oldest first; NotFoundError if none was reported."""
        rows = await self._truth.store.select(schema.TASKS, {"task_id": task_id})
        if not rows:
            raise NotFoundError(
                f"there is no task {task_id!r} in the history (a task shows up there once it has "
                "waited or run for about 100 ms, or has ended)"
            )
        return [task_of(row) for row in rows]

    async def end_job(self, job_id: str) -> None:
        """Close what is still open of a job that has ended."""
        now = self._truth.now()
        while True:
            where: dict[str, Condition] = {"job_id": job_id, "state": OPEN}
            rows = await self._truth.store.select(schema.TASKS, where, limit=1000)
            if not rows:
                return
            ends = tuple(inferred_end(task_of(row), JOB_ENDED, now) for row in rows)
            await self._truth.journal.put_tasks(ends)
