"""The registry of schedules: applies ``schedules.rules`` to what users and the controller ask."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.jobs.rules import JOBS, NOBODY, Submitter
from stoker_gcs.registry.schedules import rules
from stoker_gcs.registry.schedules.rules import SCHEDULES
from stoker_gcs.state import schema
from stoker_gcs.state.records import MAX_TRIES
from stoker_gcs.store.changes import Change, Delete, Prefix, Value, WriteConflict
from stoker_wire.errors import ConflictError, NameTakenError, NotFoundError, StokerError
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.schedules import CreateSchedule, Schedule
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.queues.registry import QueueRegistry
    from stoker_gcs.registry.schedules.rules import Run
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.control import Event
    from stoker_wire.messages.work import Job

MAX_SCHEDULES = 1000


class ScheduleRegistry:
    """Schedules by name, and a view of them in step with the log: ``changed`` is set when it moves."""

    def __init__(self, state: StateStore, jobs: JobRegistry, queues: QueueRegistry) -> None:
        self._state = state
        self._jobs = jobs
        self._queues = queues
        self.view: dict[str, Schedule] = {}
        self.changed = asyncio.Event()

    async def load(self) -> None:
        """Fill the view from SQL."""
        for schedule in await self._state.all(SCHEDULES):
            self.view[schedule.name] = schedule

    def apply_event(self, event: Event) -> None:
        """Update the view from an event of the log."""
        schedule = payload_as(event, Schedule)
        if schedule is None:
            return
        if event.kind == EventKind.SCHEDULE_DELETED:
            self.view.pop(schedule.name, None)
        else:
            self.view[schedule.name] = schedule
        self.changed.set()

    async def create(self, body: CreateSchedule, *, by: Submitter = NOBODY) -> Schedule:
        """Create a schedule; NameTakenError if there is one of this name."""
        schedule = rules.created(body, self._state.now(), by=by)
        self._jobs.check(body.job, field="job.")
        await self._queues.check(body.job.queue, field="job.queue")
        if len(self.view) >= MAX_SCHEDULES:
            raise ConflictError(f"there are {MAX_SCHEDULES} schedules\ndelete some first")
        event = self._state.event(EventKind.SCHEDULE_CREATED, body.name, schedule)
        try:
            await self._state.writer.apply(Change((SCHEDULES.insert(schedule),), (event,)))
        except WriteConflict:
            raise NameTakenError(
                f"there is a schedule {body.name!r} already\n"
                f"choose another name, or delete that one: stoker schedule delete {body.name}",
                field="name",
            ) from None
        return schedule

    async def get(self, name: str) -> Schedule:
        """Return the schedule of this name; NotFoundError if there is none."""
        found = await self._state.find(SCHEDULES, name)
        if found is None:
            raise NotFoundError(
                f"there is no schedule {name!r}\nsee which there are: stoker schedule list"
            )
        return found.record

    async def pause(self, name: str, paused: bool) -> Schedule:
        """Pause or resume a schedule."""
        await self.get(name)
        now = self._state.now()
        return await self._state.change(SCHEDULES, name, lambda one: rules.paused(one, paused, now))

    async def delete(self, name: str) -> Schedule:
        """Delete a schedule; jobs that it has submitted stay as they are."""
        for _ in range(MAX_TRIES):
            schedule = await self.get(name)
            current = await self._state.find(SCHEDULES, name)
            if current is None:
                continue
            where: dict[str, Value] = {"name": name, "version": current.version}
            event = self._state.event(EventKind.SCHEDULE_DELETED, name, schedule)
            gone = Delete(schema.SCHEDULES, where, must_exist=True)
            try:
                await self._state.writer.apply(Change((gone,), (event,)))
            except WriteConflict:
                continue
            return schedule
        raise ConflictError(f"schedule {name} is changed by too many at once\ntry again")

    async def run_due(self, name: str, now_s: float) -> Run | None:
        """Start or skip the run of a schedule whose time has come, if one has, and write that down.

        Its job has the id of its time, so a run that was started and not written down is not repeated.
        """
        found = await self._state.find(SCHEDULES, name)
        if found is None:
            return None
        schedule = found.record
        jobs = await self._jobs_of(name)
        living = [job.job_id for job in jobs if not job.state.terminal]
        run = rules.run_due(schedule, now_s, living)
        if run is None:
            return None
        if not run.skipped:
            try:
                await self._start(schedule, run)
            except StokerError as error:
                if error.retryable:
                    raise
                run = rules.Run(run.at_s, run.job_id, skipped=str(error))
        started = run
        await self._state.change(SCHEDULES, name, lambda one: rules.ran(one, started, now_s))
        await self._forget(schedule, jobs)
        return run

    async def _start(self, schedule: Schedule, run: Run) -> None:
        for job_id in run.stop:
            message = f"the next run of schedule {schedule.name} replaces it"
            with contextlib.suppress(NotFoundError):
                await self._jobs.end(job_id, JobState.STOPPED, message=message)
        await self._queues.check(schedule.job.queue)
        body = msgspec.structs.replace(schedule.job, job_id=run.job_id)
        try:
            by = Submitter(schedule.user, schedule.namespaces, run_as=schedule.run_as)
            await self._jobs.submit(body, key=None, by=by, schedule=schedule.name)
        except NameTakenError:
            known = await self._jobs.find(run.job_id)
            if known is None or known.schedule != schedule.name:
                raise

    async def _jobs_of(self, name: str) -> list[Job]:
        """Return the jobs of a schedule, the oldest first, without members of arrays."""
        found = await self._state.all(JOBS, {"job_id": Prefix(rules.id_prefix(name))})
        return [job for job in found if job.schedule == name and not job.array_id]

    async def _forget(self, schedule: Schedule, jobs: list[Job]) -> None:
        """Delete the oldest jobs that have ended, beyond those that are kept."""
        ended = [job.job_id for job in jobs if job.state.terminal]
        for job_id in ended[: max(0, len(ended) - schedule.history_limit)]:
            try:
                await self._jobs.delete(job_id)
            except (ConflictError, NotFoundError):
                continue  # after its next run again
