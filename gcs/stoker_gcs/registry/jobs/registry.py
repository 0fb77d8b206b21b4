"""The registry of jobs: applies ``jobs.rules`` to what drivers, users and the loops ask."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.store.changes import Change, WriteConflict
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    IdempotencyError,
    NameTakenError,
    NotFoundError,
)
from stoker_wire.ids import Prefix, check_id, new_id
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.work import (
    DETACHED_JOB,
    AttachDriver,
    FinishJob,
    Job,
    JobState,
    SubmitJob,
)

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import WorkerExit
    from stoker_wire.messages.control import Event


class JobRegistry:
    """Jobs by id, and a view of the living ones for checks that need no SQL."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._live: dict[str, Job] = {}

    async def load(self) -> None:
        """Fill the view of living jobs from SQL."""
        states = (JobState.PENDING.value, JobState.RUNNING.value)
        for job in await self._state.all(JOBS, {"state": states}):
            self._live[job.job_id] = job

    def apply_event(self, event: Event) -> None:
        """Update the view from an event of the log."""
        job = payload_as(event, Job)
        if job is None:
            return
        if job.state.terminal:
            self._live.pop(job.job_id, None)
        else:
            self._live[job.job_id] = job

    @property
    def live(self) -> dict[str, Job]:
        """The jobs that have not ended, as of the events applied so far."""
        return self._live

    async def check_living(self, job_id: str, *, field: str) -> None:
        """Raise unless the job exists and has not ended."""
        if job_id in self._live or job_id == DETACHED_JOB:
            return
        current = await self._state.find(JOBS, job_id)
        if current is None:
            raise NotFoundError(f"{field}: there is no job {job_id!r}", field=field)
        if current.record.state.terminal:
            raise ConflictError(f"job {job_id} has ended ({current.record.state})", field=field)

    async def has_ended(self, job_id: str) -> bool:
        """Return whether the job is known and terminal; an unknown one may yet be registered."""
        if job_id in self._live:
            return False
        current = await self._state.find(JOBS, job_id)
        return current is not None and current.record.state.terminal

    async def submit(self, body: SubmitJob, *, key: str | None) -> Job:
        """Accept a job. The id comes from ``key``, if given, so that a retry finds the same job."""
        if body.job_id is not None:
            check_id(body.job_id, Prefix.JOB, field="job_id")
        job_id = body.job_id or _id_for(key)
        job = rules.submitted(body, job_id, self._state.now())
        event = self._state.event(EventKind.JOB_SUBMITTED, job_id, job)
        try:
            await self._state.writer.apply(Change((JOBS.insert(job),), (event,)))
        except WriteConflict:
            known = await self._state.get(JOBS, job_id)
            if body.job_id is not None:
                raise NameTakenError(
                    f"there is a job {job_id} already ({known.state})\nchoose another job_id",
                    field="job_id",
                ) from None
            if known.entrypoint != body.entrypoint:
                raise IdempotencyError(
                    "this Idempotency-Key was used before for another job", field="Idempotency-Key"
                ) from None
            return known
        return job

    async def attach(self, body: AttachDriver, *, key: str | None) -> Job:
        """Attach a driver: as a new job, or as the driver of the job that it names."""
        now = self._state.now()
        if body.job_id is not None:
            return await self._state.change(
                JOBS, body.job_id, lambda job: rules.driver_attached(job, body, now)
            )
        job = rules.attached(body, _id_for(key), now)
        event = self._state.event(EventKind.JOB_STARTED, job.job_id, job)
        try:
            await self._state.writer.apply(Change((JOBS.insert(job),), (event,)))
        except WriteConflict:
            return await self._state.get(JOBS, job.job_id)
        return job

    async def finish(self, job_id: str, body: FinishJob) -> Job:
        """End a job as its driver reports; an earlier end stands."""
        if not body.state.terminal:
            raise BadRequestError(f"state: {body.state} is not an end of a job", field="state")
        return await self._end(job_id, body)

    async def end(self, job_id: str, state: JobState, *, message: str = "") -> Job:
        """End a job, unless it has ended."""
        return await self._end(job_id, FinishJob(state=state, message=message))

    async def _end(self, job_id: str, end: FinishJob) -> Job:
        now = self._state.now()
        return await self._state.change(
            JOBS,
            job_id,
            lambda job: rules.ended(
                job,
                end.state,
                now,
                message=end.message,
                exit_code=end.exit_code,
                node_id=end.node_id,
            ),
        )

    async def worker_exited(self, exit_: WorkerExit) -> None:
        """End the job whose submitted driver the worker was, if it was one."""
        if exit_.job_id and not exit_.actor_id and exit_.lease_id:
            current = await self._state.find(JOBS, exit_.job_id)
            if current is not None and current.record.submitted:
                now = self._state.now()
                await self._state.change(
                    JOBS, exit_.job_id, lambda job: rules.driver_exited(job, exit_, now)
                )


def _id_for(key: str | None) -> str:
    if key is None:
        return new_id(Prefix.JOB)
    return f"{Prefix.JOB.value}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
