"""The end of what a job, or an attempt of one, has started: its lease, actors, groups, workers, objects.

The next attempt of a job starts when all nodes that live have ended what the one before has left: so an
order to end it can never meet work of the next.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs.rules import JOBS, not_ended_text
from stoker_wire.errors import NotFoundError, UnavailableError
from stoker_wire.messages.common import Empty
from stoker_wire.messages.work import EndAttempt, JobState

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.groups.registry import GroupRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.work import Job

LAST_REPORTS_S = 3.0
"""How long processes that ended have to report their tasks before the end of these is inferred."""


class JobWork:
    """The work of jobs: all that they have started."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        *,
        actors: ActorRegistry,
        groups: GroupRegistry,
        releaser: LeaseReleaser,
        history: TaskHistory,
    ) -> None:
        self._state = state
        self._peers = peers
        self._actors = actors
        self._groups = groups
        self._releaser = releaser
        self._history = history

    async def end(self, job: Job) -> None:
        """End all that a job has started, once it has ended itself."""
        job_id = job.job_id
        self._releaser.start(job.lease_id, f"job {job_id} is {job.state}")
        reason = f"its job {job_id} ended ({job.state})"
        await self._actors.end_job(job_id, reason)
        await self._groups.end_job(job_id, reason)
        await asyncio.sleep(LAST_REPORTS_S)
        await self._history.close_job(job_id)

    async def before_retry(self, job: Job) -> bool:
        """End what the attempt before has left, and wait until the next may start; False if the job ends.

        Nothing of the next attempt is older than ``retry_at_s``, so it may be done twice.
        """
        if job.retry_at_s is None:
            return True
        if job.state is not JobState.PENDING:
            return False
        before = job.attempts[-1]
        reason = f"attempt {before.attempt} of its job {job.job_id} failed"
        self._releaser.start(before.lease_id, reason)
        await self._actors.end_job(job.job_id, reason, before_s=job.retry_at_s)
        await self._groups.end_job(job.job_id, reason, before_s=job.retry_at_s)
        await self._end_on_nodes(job.job_id, before.attempt)
        left_s = max(0.0, job.retry_at_s - self._state.now())
        now = await self._state.wait_for(JOBS, job.job_id, lambda one: one.state.terminal, left_s)
        await self._history.close_job(job.job_id, before_s=job.retry_at_s)
        return now.state is JobState.PENDING

    async def _end_on_nodes(self, job_id: str, attempt: int) -> None:
        """Have all nodes that live end what attempts have left; UnavailableError names one that has not."""

        async def ask(_: Node, client: Client) -> Empty:
            path = f"/v1/jobs/{job_id}/end-attempt"
            body = EndAttempt(attempt=attempt)
            try:
                return await client.call("POST", path, body, reply=Empty, retry=False)
            except NotFoundError:  # of an older version: there the scheduler ends the leases
                return Empty()

        replies = await self._peers.ask_nodelets(ask)
        silent = [n.node_id for n in self._peers.live_nodes() if n.node_id not in replies]
        if silent:
            raise UnavailableError(not_ended_text(silent[0], job_id, attempt))
