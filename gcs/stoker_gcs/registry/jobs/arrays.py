"""Job arrays: one submission that is many jobs, so many of them at once as it permits.

The array is a job without a driver; each index is a job of its own, ``JOB.INDEX``, made with the array in one
transaction. What is one per node gets its indices when it starts: one for each node that can run it then.
Runs on the leading replica, started by the reconciler; a new leader goes on where this one was, as what has
run stands in the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.placement import demand_of
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.control import Explanation, Fit
from stoker_wire.messages.work import FinishJob, JobState
from stoker_wire.process.background import first_cause

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.jobs.placement import DriverPlacement
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.work import Job

RETRY_S = 1.0
LOOK_S = 60.0
TELL_S = 1.0


class JobArrays:
    """The arrays that are not over."""

    def __init__(
        self, state: StateStore, peers: PeerClients, jobs: JobRegistry, placement: DriverPlacement
    ) -> None:
        self._state = state
        self._peers = peers
        self._jobs = jobs
        self._placement = placement
        self._told_at_s: dict[str, float] = {}

    async def run(self, array_id: str) -> None:
        """Start the members of an array, as many at once as it permits, and end it when all have ended."""
        array = await self._state.get(JOBS, array_id)
        if array.state is JobState.PENDING:
            if not await self._placement.may_start(array):
                return
            node_ids = await self._nodes_for(array) if array.one_per_node is not None else []
            if array.one_per_node is not None and not node_ids:
                await self._jobs.end(array_id, JobState.FAILED, message="no node can run it")
                return
            array = await self._jobs.start_array(array_id, node_ids)
        if array.state.terminal or array.array is None:
            return
        members = await self._jobs.members(array_id)
        slots = asyncio.Semaphore(array.array.parallelism or len(members))
        # Those that run already, after a change of the leader, have their slots.
        members.sort(key=lambda job: (job.state is JobState.PENDING, job.array_index))
        to_run = [one.job_id for one in members if not one.state.terminal]
        try:
            async with asyncio.TaskGroup() as tasks:
                late = tasks.create_task(self._end_if_late(array))
                async with asyncio.TaskGroup() as runs:
                    for job_id in to_run:
                        runs.create_task(self._run(array_id, job_id, slots))
                late.cancel()
        except ExceptionGroup as group:
            raise first_cause(group) from group
        await self._end(array_id)

    async def _end_if_late(self, array: Job) -> None:
        """End an array of which no member has started within its start deadline."""
        left_s = rules.start_deadline_left_s(array, self._state.now())
        if left_s == math.inf:
            return
        await asyncio.sleep(max(0.0, left_s))
        members = await self._jobs.members(array.job_id)
        if not any(one.started_at_s for one in members):
            waiting = next((one.message for one in members if not one.state.terminal), "")
            late = msgspec.structs.replace(array, message=waiting)
            await self._jobs.end(array.job_id, JobState.FAILED, message=rules.too_late(late))

    async def _nodes_for(self, array: Job) -> list[str]:
        """Return the nodes that can run a job now or when others have ended, as the scheduler judges."""
        why = await self._peers.call_scheduler(
            "POST", "/v1/explain", demand_of(array), reply=Explanation
        )
        return sorted(one.node_id for one in why.verdicts if one.fit is not Fit.NEVER)

    async def _run(self, array_id: str, job_id: str, slots: asyncio.Semaphore) -> None:
        """Run one member to its end."""
        async with slots:
            array = await self._state.get(JOBS, array_id)
            if array.state.terminal:
                return
            await self._place(job_id)
            while True:
                job = await self._state.wait_for(
                    JOBS, job_id, lambda job: job.state.terminal, LOOK_S
                )
                if job.state.terminal:
                    break
        await self._tell(array_id)

    async def _place(self, job_id: str) -> None:
        while True:
            try:
                return await self._placement.place(job_id)
            except StokerError as error:
                if not error.retryable:
                    with contextlib.suppress(NotFoundError):
                        await self._jobs.end(job_id, JobState.FAILED, message=str(error))
                    return
            await asyncio.sleep(RETRY_S)

    async def _tell(self, array_id: str) -> None:
        """Write down how many have ended, once a second."""
        now = self._state.now()
        if now - self._told_at_s.get(array_id, 0.0) < TELL_S:
            return
        self._told_at_s[array_id] = now
        text, _ = rules.array_progress(await self._jobs.members(array_id))
        with contextlib.suppress(StokerError):  # the next that ends tells of this one too
            await self._state.change(JOBS, array_id, lambda job: rules.array_advanced(job, text))

    async def _end(self, array_id: str) -> None:
        self._told_at_s.pop(array_id, None)
        text, is_ok = rules.array_progress(await self._jobs.members(array_id))
        state = JobState.SUCCEEDED if is_ok else JobState.FAILED
        end = FinishJob(state=state, exit_code=int(not is_ok), message=text)
        await self._jobs.finish(array_id, end)


def is_member(job: Job) -> bool:
    """Return whether a job is of an array, which starts it."""
    return job.array_id != ""
