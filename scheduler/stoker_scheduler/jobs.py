"""Jobs, as far as scheduling depends on them: queue, user and priority.

The gcs owns jobs; :mod:`stoker_scheduler.gcs_feed` keeps this copy up to date. A request says only of
which job it is, so nobody can ask in another's name or jump the queue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from stoker_scheduler.core.model.queues import DEFAULT_QUEUE
from stoker_wire.messages.work import DETACHED_JOB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker_scheduler.core.model.node_filters import NodeFilter
    from stoker_wire.messages.work import Job

ARRIVAL_S = 0.5
"""How long a request waits for its job to be known here: the gcs tells of it in milliseconds."""
MAX_ACTORS = 4096
"""Detached actors of which it is kept as whom they run."""


class JobFacts(NamedTuple):
    """A living job, as far as scheduling depends on it; ``node_filters`` are those of its queue.

    ``run_as`` is the Unix user of its processes; None if that is not known here.
    """

    queue: str = DEFAULT_QUEUE
    user: str = ""
    priority: int = 0
    attempt: int = 1
    node_filters: tuple[NodeFilter, ...] = ()
    run_as: str | None = None


class JobDirectory:
    """The jobs that have not ended, by id.

    ``has_ended`` asks the gcs about a job that is not known here: it may have ended before this term. Its
    answer is None if the gcs cannot say. ``find_run_as`` asks it as whom a job, or the detached actor of an
    id, runs; it raises what the gcs says.
    """

    def __init__(
        self,
        has_ended: Callable[[str], Awaitable[bool | None]] | None = None,
        find_run_as: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        self._has_ended = has_ended
        self._find_run_as = find_run_as
        self._actors_run_as: dict[str, str] = {}
        self._jobs: dict[str, JobFacts] = {DETACHED_JOB: JobFacts()}
        self._filters: dict[str, tuple[NodeFilter, ...]] = {}
        self._awaited: dict[str, asyncio.Event] = {}

    def put(self, job: Job) -> bool:
        """Add or update a job; return whether it is at another attempt than was known."""
        retried = self.begin_attempt(job.job_id, job.attempt)
        attempt = max(job.attempt, self._jobs.get(job.job_id, JobFacts()).attempt)
        self._jobs[job.job_id] = JobFacts(
            job.queue, job.user, job.priority, attempt, run_as=job.run_as
        )
        awaited = self._awaited.get(job.job_id)
        if awaited is not None:
            awaited.set()
        return retried

    def begin_attempt(self, job_id: str, attempt: int) -> bool:
        """Record that a known job is at this attempt; return False if that is not new."""
        known = self._jobs.get(job_id)
        if known is None or known.attempt >= attempt:
            return False
        self._jobs[job_id] = known._replace(attempt=attempt)
        return True

    def ids(self) -> set[str]:
        """Return the ids of the jobs that are known, but that of detached actors, which never ends."""
        return self._jobs.keys() - {DETACHED_JOB}

    def drop(self, job_id: str) -> None:
        """Remove a job that has ended."""
        self._jobs.pop(job_id, None)

    def get(self, job_id: str) -> JobFacts | None:
        """Return what is known of a job."""
        facts = self._jobs.get(job_id)
        filters = self._filters.get(facts.queue) if facts is not None else None
        return facts if facts is None or filters is None else facts._replace(node_filters=filters)

    async def run_as(self, job_id: str, actor_id: str) -> str:
        """Return the Unix user of a job's processes, or of those of a detached actor.

        Nobody runs as another for want of an answer: StokerError if the gcs gives none.
        """
        facts = self.get(job_id)
        if facts is not None and facts.run_as is not None:
            return facts.run_as
        subject = actor_id if job_id == DETACHED_JOB else job_id
        if not subject or self._find_run_as is None:
            return ""
        if subject not in self._actors_run_as:
            found = await self._find_run_as(subject)
            if job_id != DETACHED_JOB:
                if (known := self._jobs.get(job_id)) is not None:
                    self._jobs[job_id] = known._replace(run_as=found)
                return found
            if len(self._actors_run_as) >= MAX_ACTORS:
                self._actors_run_as.clear()
            self._actors_run_as[subject] = found
        return self._actors_run_as[subject]

    def set_filters(self, filters: dict[str, tuple[NodeFilter, ...]]) -> None:
        """Replace the node filters of queues, by name: their own and those of the queues above them."""
        self._filters = filters

    async def arrival(self, job_id: str) -> JobFacts | None:
        """Wait for a job that is not known yet; None if it has ended.

        What never comes, and has not ended as far as is known, is as a job of the default queue: from now on
        if the gcs says so, else for this request.
        """
        arrived = self._awaited.setdefault(job_id, asyncio.Event())
        try:
            async with asyncio.timeout(ARRIVAL_S):
                await arrived.wait()
        except TimeoutError:
            pass
        finally:
            self._awaited.pop(job_id, None)
        if job_id not in self._jobs and self._has_ended:
            ended = await self._has_ended(job_id)
            if ended is None and job_id not in self._jobs:
                return JobFacts()
            if ended:
                return None
        self._jobs.setdefault(job_id, JobFacts())
        return self.get(job_id)
