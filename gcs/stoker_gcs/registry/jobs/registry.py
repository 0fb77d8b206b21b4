"""The registry of jobs: applies ``jobs.rules`` to what drivers, users and the loops ask."""

from __future__ import annotations

import hashlib
import math
import random
from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.actors.rules import LIVING as LIVING_ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.groups.rules import LIVING as LIVING_GROUPS
from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.state import schema
from stoker_gcs.state.records import MAX_TRIES
from stoker_gcs.state.removed_runs import remove_runs
from stoker_gcs.state.removed_tasks import removed_until
from stoker_gcs.store.changes import Change, Delete, Upsert, WriteConflict
from stoker_gcs.store.changes import Prefix as SqlPrefix
from stoker_wire.amounts import check_parts
from stoker_wire.constraints import node_filters, variables
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    IdempotencyError,
    NameTakenError,
    NotFoundError,
)
from stoker_wire.ids import Prefix, check_id, new_id
from stoker_wire.messages.elastic import GenerationTurn, ReportGenerationTurn
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.groups import GroupState
from stoker_wire.messages.work import (
    DETACHED_JOB,
    ActorState,
    AttachDriver,
    FinishJob,
    Job,
    JobState,
    ReportSlowRank,
    SlowRank,
    SubmitJob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.registry.jobs.rules import Submitter
    from stoker_gcs.state.records import StateStore, Transition
    from stoker_gcs.store.changes import Condition, Operation, Row
    from stoker_wire.messages.cluster import WorkerExit
    from stoker_wire.messages.control import Event


BATCH = 500
"""Rows of one transaction of a deletion: others wait for it."""
TIMEOUT_LOOK_S = 60.0
"""How long a wait for the end of a job lasts at most, before its timeout is looked at again."""


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
        """Return whether the job is terminal, or deleted; an unknown one may yet be registered."""
        if job_id in self._live:
            return False
        current = await self._state.find(JOBS, job_id)
        if current is None:
            return await self._state.store.get(schema.DELETED_JOBS, {"job_id": job_id}) is not None
        return current.record.state.terminal

    def check(self, body: SubmitJob, *, field: str = "") -> None:
        """Raise BadRequestError for a submission that no job can be made of; ``field`` is where it stands."""
        array = body.array
        if array is not None and len(set(array.indices)) < len(array.indices):
            raise BadRequestError("array: an index is there twice", field=f"{field}array.indices")
        if array is not None and body.one_per_node is not None:
            raise BadRequestError(
                "one_per_node: an array has indices of its own\nleave one of the two out",
                field=f"{field}one_per_node",
            )
        check_parts(body.resources, f"{field}resources")
        node_filters.check(body.node_filter, field=f"{field}node_filter")
        variables.check(body.runtime_env.env_vars, f"{field}runtime_env.env_vars")

    async def report_slow_rank(self, job_id: str, body: ReportSlowRank) -> SlowRank:
        """Write a slow rank of a living job into the event log, which policies follow."""
        await self.check_living(job_id, field="job_id")
        slow = SlowRank(
            job_id=job_id,
            node_id=body.node_id,
            rank=body.rank,
            ratio=body.ratio,
            since_s=body.since_s,
            group=body.group,
        )
        event = self._state.event(EventKind.RANK_SLOW, body.node_id, slow)
        await self._state.writer.apply(Change((), (event,)))
        return slow

    async def report_turn(self, job_id: str, body: ReportGenerationTurn) -> GenerationTurn:
        """Write a turn of a living job's generations into the event log, for its story."""
        await self.check_living(job_id, field="job_id")
        turn = GenerationTurn(
            job_id=job_id,
            generation=body.generation,
            before=body.before,
            after=body.after,
            why=body.why,
            replicas=body.replicas,
        )
        event = self._state.event(EventKind.GENERATION_TURNED, job_id, turn)
        await self._state.writer.apply(Change((), (event,)))
        return turn

    async def submit(
        self,
        body: SubmitJob,
        *,
        key: str | None,
        by: Submitter = rules.NOBODY,
        schedule: str = "",
    ) -> Job:
        """Accept a job. The id comes from ``key`` and its user, so that a retry finds the same job."""
        self.check(body)
        if body.job_id is not None:
            check_id(body.job_id, Prefix.JOB, field="job_id")
            await self._check_unused(body, body.job_id)
        job_id = body.job_id or _id_for(key, by)
        await self._check_dependencies(body, job_id)
        job = rules.submitted(body, job_id, self._state.now(), by=by, schedule=schedule)
        new = [job, *(rules.members_of(job) if body.array is not None else ())]
        rows = tuple(JOBS.insert(one) for one in new)
        events = tuple(self._state.event(EventKind.JOB_SUBMITTED, one.job_id, one) for one in new)
        try:
            await self._state.writer.apply(Change(rows, events))
        except WriteConflict:
            found = await self._state.find(JOBS, job_id)
            if found is None:
                raise NameTakenError(
                    f"there is a job {job_id}.INDEX already\nchoose another job_id", field="job_id"
                ) from None
            known = found.record
            if body.job_id is not None:
                raise NameTakenError(
                    f"there is a job {job_id} already ({known.state})\nchoose another job_id",
                    field="job_id",
                ) from None
            return _same(known, job)
        return job

    async def _check_unused(self, body: SubmitJob, job_id: str) -> None:
        """Raise for the ids of jobs that are deleted: logs and events of two would mix."""
        if await self._state.find(JOBS, job_id) is not None:
            return
        of_id: list[Condition] = [job_id]
        if body.array is not None:
            of_id.append(SqlPrefix(f"{job_id}."))
        deleted: list[Row] = []
        for condition in of_id:
            deleted += await self._state.store.select(
                schema.DELETED_JOBS, {"job_id": condition}, limit=1
            )
        if deleted:
            raise NameTakenError(
                f"there was a job {deleted[0]['job_id']}, which is deleted\nchoose another job_id",
                field="job_id",
            )

    async def _check_dependencies(self, body: SubmitJob, job_id: str) -> None:
        """Raise unless the jobs to run after are there: none can then be after itself."""
        for index, dependency in enumerate(body.after):
            if dependency.job_id == job_id or (
                await self._state.find(JOBS, dependency.job_id) is None
            ):
                raise BadRequestError(
                    f"after: there is no job {dependency.job_id!r}\nsubmit it first",
                    field=f"after.{index}.job_id",
                )

    async def attach(
        self, body: AttachDriver, *, key: str | None, by: Submitter = rules.NOBODY
    ) -> Job:
        """Attach a driver: as a new job, or as the driver of the job that it names."""
        now = self._state.now()
        if body.job_id is not None:
            return await self._state.change(
                JOBS, body.job_id, lambda job: rules.driver_attached(job, body, now)
            )
        job = rules.attached(body, _id_for(key, by), now, by=by)
        event = self._state.event(EventKind.JOB_STARTED, job.job_id, job)
        try:
            await self._state.writer.apply(Change((JOBS.insert(job),), (event,)))
        except WriteConflict:
            return _same(await self._state.get(JOBS, job.job_id), job)
        return job

    async def finish(self, job_id: str, body: FinishJob) -> Job:
        """End a job as its driver reports; an earlier end stands."""
        if not body.state.terminal:
            raise BadRequestError(f"state: {body.state} is not an end of a job", field="state")
        if body.state is JobState.FAILED or (body.state is JobState.STOPPED and body.attempt):
            # Its user's order to stop would have ended it here, before the nodelet can report that.
            return await self.fail_attempt(job_id, body)
        return await self._end(job_id, body)

    async def fail_attempt(self, job_id: str, end: FinishJob) -> Job:
        """End a job's attempt that failed, and with it the job unless retries are left."""
        now, jitter = self._state.now(), random.random()
        return await self._state.change(
            JOBS, job_id, lambda job: rules.attempt_failed(job, end, now, jitter)
        )

    async def end(
        self, job_id: str, state: JobState, *, message: str = "", attempt: int = 0
    ) -> Job:
        """End a job, unless it has ended, or is not at this attempt any more (0: whichever it is at)."""
        return await self._end(job_id, FinishJob(state=state, message=message, attempt=attempt))

    async def _end(self, job_id: str, end: FinishJob) -> Job:
        now = self._state.now()

        def rule(job: Job) -> Transition[Job] | None:
            if end.attempt not in (0, job.attempt):
                return None
            return rules.ended(
                job,
                end.state,
                now,
                message=end.message,
                exit_code=end.exit_code,
                node_id=end.node_id,
            )

        return await self._state.change(JOBS, job_id, rule)

    async def end_late(self, job_id: str) -> Job:
        """End a job whose first attempt has not started within its start deadline; else change nothing."""

        def rule(job: Job) -> Transition[Job] | None:
            now = self._state.now()
            if job.state is not JobState.PENDING or rules.start_deadline_left_s(job, now) > 0:
                return None
            return rules.ended(job, JobState.FAILED, now, message=rules.too_late(job))

        return await self._state.change(JOBS, job_id, rule)

    async def find(self, job_id: str) -> Job | None:
        """Return a job, or None if there is none of this id."""
        found = await self._state.find(JOBS, job_id)
        return None if found is None else found.record

    async def start_array(self, array_id: str, node_ids: Sequence[str] = ()) -> Job:
        """Begin an array; one that is one per node gets its members, on these nodes, with it."""
        for _ in range(MAX_TRIES):
            current = await self._state.find(JOBS, array_id)
            if current is None:
                raise NotFoundError(f"there is no job {array_id!r}")
            transition = rules.array_started(current.record, self._state.now(), node_ids)
            if transition is None:
                return current.record
            array = transition.record
            new = rules.members_of(array, node_ids) if node_ids else []
            event = self._state.event
            change = Change(
                (JOBS.update(current, array), *(JOBS.insert(one) for one in new)),
                (
                    event(transition.kind, array_id, array),
                    *(event(EventKind.JOB_SUBMITTED, one.job_id, one) for one in new),
                ),
            )
            try:
                await self._state.writer.apply(change)
            except WriteConflict:
                continue
            return array
        raise ConflictError(f"job {array_id} is changed by too many at once\ntry again")

    async def members(self, array_id: str) -> list[Job]:
        """Return the jobs of an array, by their indices."""
        found = await self._state.all(JOBS, {"job_id": SqlPrefix(f"{array_id}.")})
        members = [job for job in found if job.array_id == array_id]
        return sorted(members, key=lambda job: job.array_index)

    async def end_members(self, array: Job) -> None:
        """End what is left of an array that has ended."""
        for job in await self.members(array.job_id) if array.array is not None else ():
            if not job.state.terminal:
                message = f"its array {array.job_id} is {array.state}"
                await self.end(job.job_id, JobState.STOPPED, message=message)

    async def end_at_timeout(self, job_id: str) -> None:
        """End a job when it has run for as long as it may; return when it has ended."""
        while True:
            job = await self._state.get(JOBS, job_id)
            left_s = rules.timeout_left_s(job, self._state.now())
            if job.state.terminal or left_s == math.inf:
                return
            if left_s <= 0:
                message = f"it has run for longer than its timeout of {job.timeout_s:g} s"
                await self.end(job_id, JobState.FAILED, message=message)
                return
            await self._state.wait_for(
                JOBS, job_id, lambda job: job.state.terminal, min(left_s, TIMEOUT_LOOK_S)
            )

    async def delete(self, job_id: str, *, tasks_ended_by_s: float | None = None) -> Job:
        """Remove a job that has ended, with its tasks, actors and groups; its id is not given again.

        With ``tasks_ended_by_s`` the history records that tasks of before that time are not whole.
        Its rows leave in batches, it at last: what is interrupted is done again.
        """
        for _ in range(MAX_TRIES):
            current = await self._state.find(JOBS, job_id)
            if current is None:
                raise NotFoundError(f"there is no job {job_id!r}")
            job = current.record
            if not job.state.terminal:
                raise ConflictError(
                    f"job {job_id} is {job.state}\nstop it first: stoker job stop {job_id}"
                )
            members = await self.members(job_id) if job.array is not None else []
            alive = [one.job_id for one in members if not one.state.terminal]
            if alive:
                raise ConflictError(f"job {alive[0]} of the array has not ended\ntry again soon")
            gone = (job, *members)
            ids = [one.job_id for one in gone]
            await self._check_idle(ids)
            for start in range(0, len(ids), BATCH):
                await self._delete_work(tuple(ids[start : start + BATCH]), tasks_ended_by_s)
            own: dict[str, Condition] = {"job_id": job_id, "version": current.version}
            operations: list[Operation] = [Delete(schema.JOBS, own, must_exist=True)]
            operations += [Delete(schema.JOBS, {"job_id": one}) for one in ids[1:]]
            operations += [Upsert(schema.DELETED_JOBS, {"job_id": one}) for one in ids]
            event = self._state.event
            events = tuple(event(EventKind.JOB_DELETED, one.job_id, one) for one in gone)
            try:
                await self._state.writer.apply(Change(tuple(operations), events))
            except WriteConflict:
                continue
            return job
        raise ConflictError(f"job {job_id} is changed by too many at once\ntry again")

    async def _check_idle(self, job_ids: Sequence[str]) -> None:
        """Raise while something lives that the jobs have made, of which their records tell."""
        for start in range(0, len(job_ids), BATCH):
            of_jobs = tuple(job_ids[start : start + BATCH])
            actors = await self._state.all(ACTORS, {"job_id": of_jobs, "state": LIVING_ACTORS})
            groups = await self._state.all(GROUPS, {"job_id": of_jobs, "state": LIVING_GROUPS})
            living = {one.actor_id: one.detached for one in actors}
            living |= {one.group_id: one.detached for one in groups}
            for living_id, detached in living.items():
                if not detached:
                    raise ConflictError(
                        f"{living_id} of job {job_ids[0]} is still being ended\ntry again soon"
                    )
                raise ConflictError(
                    f"{living_id} of job {job_ids[0]} is detached and lives\nend it first"
                )

    async def _delete_work(self, job_ids: tuple[str, ...], tasks_ended_by_s: float | None) -> None:
        """Delete the tasks of jobs, and actors and groups that have ended."""
        of_jobs: dict[str, Condition] = {"job_id": job_ids}
        while await self._state.store.count(schema.TASKS, of_jobs, most=1):
            some = Delete(schema.TASKS, of_jobs, most=BATCH)
            until: tuple[Operation, ...] = ()
            if tasks_ended_by_s is not None:
                until = await removed_until(self._state.store, tasks_ended_by_s)
            await self._state.writer.apply(Change((some, *until)))
        for counts in (schema.TASK_COUNTS, schema.TASK_DURATIONS):
            await self._state.writer.apply(Change((Delete(counts, of_jobs),)))
        await remove_runs(self._state, job_ids)
        for table, ended in (
            (schema.ACTORS, ActorState.DEAD.value),
            (schema.PLACEMENT_GROUPS, GroupState.REMOVED.value),
        ):
            (key,) = table.key
            where: dict[str, Condition] = {**of_jobs, "state": ended}
            while rows := await self._state.store.select(
                table, where, limit=BATCH, columns=(key,), any_order=True
            ):
                ids = tuple(row[key] for row in rows)
                gone = Delete(table, {key: ids, "state": ended})
                event = self._state.removal(table, ids)
                await self._state.writer.apply(Change((gone,), (event,)))

    async def worker_exited(self, exit_: WorkerExit) -> None:
        """End the job whose submitted driver the worker was, if it was one."""
        if exit_.job_id and not exit_.actor_id and exit_.lease_id:
            current = await self._state.find(JOBS, exit_.job_id)
            if current is not None and current.record.submitted:
                now, jitter = self._state.now(), random.random()
                await self._state.change(
                    JOBS, exit_.job_id, lambda job: rules.driver_exited(job, exit_, now, jitter)
                )


def _same(known: Job, job: Job) -> Job:
    """Return the job that a request made when it was sent first."""
    if not rules.is_of_same_request(known, job):
        raise IdempotencyError(
            "this Idempotency-Key was used before with another body\nuse a new key for a new job",
            field="Idempotency-Key",
        )
    return known


def _id_for(key: str | None, by: Submitter) -> str:
    if key is None:
        return new_id(Prefix.JOB)
    seed = (
        f"{by.user} {key}"  # whoever has seen a key of another user gets no job of that one by it
    )
    return f"{Prefix.JOB.value}_{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
