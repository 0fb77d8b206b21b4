"""The task history: durable before the reply, merged by attempt in any order; unreported ends are inferred.

An attempt is closed here when its job, its worker or its node has ended without a report of its end.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change
from stoker_gcs.store.rows import task_of
from stoker_gcs.store.task_merge import inferred_end
from stoker_wire.data.spool import RANKS, UNREADABLE, record_of, row_of, rows_in
from stoker_wire.errors import NotFoundError
from stoker_wire.messages.control import Page
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import (
    DETACHED_JOB,
    SlowTask,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Row
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.cluster import WorkerExit
    from stoker_wire.messages.control import ListQuery
    from stoker_wire.messages.work import ReportSlowTask

OPEN = (TaskState.WAITING.value, TaskState.QUEUED.value, TaskState.RUNNING.value)
RUNNING = (TaskState.RUNNING.value,)
JOB_ENDED = "its job ended before it did"
_ENDED_RANK = RANKS[TaskState.FINISHED]
_PAGE = 1000
_LOOKED_UP = 200
_PER_TURN = 10 * _LOOKED_UP
"""Attempts that are looked at again in one turn of a watch; of more, each has its turn."""
_LOOK_S = 0.25


class TaskHistory:
    """Reports, lists and inferred ends of task attempts."""

    def __init__(self, state: StateStore, jobs: JobRegistry) -> None:
        self._state = state
        self._jobs = jobs
        self.accepted = 0
        self.dropped = 0
        self.unreadable = 0
        """Damaged rows that a list met, which shows them by their columns alone."""
        self.on_stored: Callable[[Sequence[TaskRow]], object] | None = None
        """Called with rows once they are in SQL, also with those that came before."""

    async def report(self, records: tuple[TaskRecord, ...]) -> TaskHistoryStatus:
        """Store the records of a report."""
        return await self._store([row_of(record) for record in records])

    async def add_spooled(self, body: bytes) -> TaskHistoryStatus:
        """Store the rows of whole frames of spool files, as they come."""
        rows, dropped = rows_in(body)
        self.dropped += dropped
        return await self._store(rows)

    async def _store(self, rows: Sequence[TaskRow]) -> TaskHistoryStatus:
        """Store a batch. An open attempt of a job that has ended is stored as ended."""
        jobs = {row[2] for row in rows if row[7] < _ENDED_RANK}
        ended = {job_id for job_id in jobs if await self._jobs.has_ended(job_id)}
        if ended:
            now = self._state.now()
            rows = [
                row_of(inferred_end(record_of(row), JOB_ENDED, now))
                if row[2] in ended and row[3] in OPEN
                else row
                for row in rows
            ]
        await self._put(rows)
        self.accepted += len(rows)
        return TaskHistoryStatus(accepted=len(rows), dropped=self.dropped)

    async def report_slow(self, job_id: str, task_id: str, body: ReportSlowTask) -> SlowTask:
        """Write a slow attempt of a task into the event log, for its story."""
        await self._jobs.check_living(job_id, field="job_id")
        slow = SlowTask(job_id=job_id, task_id=task_id, **msgspec.structs.asdict(body))
        event = self._state.event(EventKind.TASK_SLOW, task_id, slow)
        await self._state.writer.apply(Change((), (event,)))
        return slow

    async def page(self, query: ListQuery, where: Mapping[str, Condition]) -> Page[TaskRecord]:
        """Return a page of attempts."""
        given = {name: value for name, value in where.items() if value not in ("", ())}
        rows, cursor = await self._state.rows(schema.TASKS, query, given)
        items = self._read(rows)
        total, exact = await self._state.total(schema.TASKS, query, given)
        return Page(
            items=items,
            next_cursor=cursor,
            seq=self._state.log.last,
            total=total,
            total_exact=exact,
        )

    async def follow(
        self, narrowed: Callable[[], Awaitable[Mapping[str, Condition]]]
    ) -> AsyncIterator[TaskRecord]:
        """Yield the attempts that match, in the order in which they came, and again with each later state.

        The table is looked at again and again: other replicas write it too. ``narrowed`` gives the filters.
        """
        open_: dict[tuple[str, int], int] = {}
        """The last rank of each attempt that was yielded and has not ended."""
        after: tuple[str | int, ...] = ()
        while True:
            where = {name: one for name, one in (await narrowed()).items() if one not in ("", ())}
            rows = await self._state.store.select(
                schema.TASKS, where, after=after, limit=_PAGE, arrival=True
            )
            for row in rows:
                after = (row[schema.ARRIVAL],)
                open_[row["task_id"], row["attempt"]] = row["rank"]
                yield task_of(row)
            if len(rows) == _PAGE:
                continue
            async for record in self._later(open_):
                yield record
            await asyncio.sleep(_LOOK_S)

    async def _later(self, open_: dict[tuple[str, int], int]) -> AsyncIterator[TaskRecord]:
        """Yield those of some attempts that are in a later state; forget those that have ended, or left."""
        keys = list(itertools.islice(open_, _PER_TURN))  # those that stay open go to the end
        for first in range(0, len(keys), _LOOKED_UP):
            looked_up = keys[first : first + _LOOKED_UP]
            where = {"task_id": tuple({task_id for task_id, _ in looked_up})}
            rows = {
                (row["task_id"], row["attempt"]): row
                for row in await self._state.store.select(schema.TASKS, where)
            }
            for key in looked_up:
                row = rows.get(key)
                known = open_.pop(key)
                if row is None:
                    continue
                if row["rank"] > known:
                    yield task_of(row)
                if row["rank"] < _ENDED_RANK:
                    open_[key] = row["rank"]

    async def attempts(self, task_id: str) -> list[TaskRecord]:
        """Return all attempts of a task, oldest first; NotFoundError if none was reported."""
        rows = await self._state.store.select(schema.TASKS, {"task_id": task_id})
        if not rows:
            raise NotFoundError(
                f"there is no task {task_id!r} in the history\n"
                "a task shows up there once it has waited or run for about 100 ms, or has ended"
            )
        return list(self._read(rows))

    def _read(self, rows: Sequence[Row]) -> tuple[TaskRecord, ...]:
        records = tuple(task_of(row) for row in rows)
        self.unreadable += sum(record.error is UNREADABLE for record in records)
        return records

    async def close_job(self, job_id: str, *, before_s: float = math.inf) -> None:
        """Close the open attempts of a job that has ended, or was tried again at ``before_s``."""

        def was_open(record: TaskRecord) -> bool:
            return (record.submitted_at_s or record.started_at_s or 0.0) < before_s

        await self._close(job_id, OPEN, JOB_ENDED, was_open)

    async def close_worker(self, exit_: WorkerExit) -> None:
        """Close the attempts that a worker ran when it ended, and those it submitted that wait.

        Callers report on their own calls; this is for calls whose callers died as well.
        """
        worker_id = exit_.worker_id
        await self._close(
            exit_.job_id,
            OPEN,
            f"its worker {worker_id} ended: {exit_.cause}",
            lambda record: (
                record.worker_id == worker_id
                if record.state is TaskState.RUNNING
                else record.owner_id == worker_id
            ),
        )

    async def close_node(self, node_id: str, reason: str, *, before_s: float) -> None:
        """Close the attempts that ran on a node when it died or started again, at ``before_s``."""

        def was_running(record: TaskRecord) -> bool:
            return record.node_id == node_id and (record.started_at_s or 0.0) < before_s

        for job_id in [*self._jobs.live, DETACHED_JOB]:
            await self._close(job_id, RUNNING, reason, was_running)

    async def _close(
        self,
        job_id: str,
        states: tuple[str, ...],
        reason: str,
        concerned: Callable[[TaskRecord], bool],
    ) -> None:
        now = self._state.now()
        after: tuple[str | int, ...] = ()
        where: dict[str, Condition] = {"job_id": job_id, "state": states}
        while rows := await self._state.store.select(schema.TASKS, where, after=after, limit=_PAGE):
            after = (rows[-1]["task_id"], rows[-1]["attempt"])
            records = [record for row in rows if concerned(record := task_of(row))]
            ends = [row_of(inferred_end(record, reason, now)) for record in records]
            await self._put(ends)

    async def _put(self, rows: Sequence[TaskRow]) -> None:
        await self._state.writer.put_tasks(rows)
        if self.on_stored is not None:
            self.on_stored(rows)
