"""Placement of the drivers of submitted jobs: a lease of kind ``driver``.

Runs on the leading replica, started by the reconciler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.leases import FIRST_POLL_S, OWNER, POLL_S, Refused, request_lease
from stoker_gcs.registry.worker_exits import find_exit
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import Demand, DriverSpec, LeaseKind, LeaseRequest
from stoker_wire.messages.common import OnInfeasible, Strategy
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.jobs.attempts import JobWork
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import GrantedLease
    from stoker_wire.messages.work import Job


class DriverPlacement:
    """Placement of drivers: leases a worker for each submitted job, and has its nodelet start the driver."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        jobs: JobRegistry,
        work: JobWork,
        releaser: LeaseReleaser,
    ) -> None:
        self._state = state
        self._peers = peers
        self._jobs = jobs
        self._work = work
        self._releaser = releaser

    async def place(self, job_id: str) -> None:
        """Start the driver of one submitted job, or end the job with the scheduler's reason.

        The driver of an attempt after the first starts when it may, and nothing of the one before is left.
        """
        job = await self._state.get(JOBS, job_id)

        async def still_wanted() -> bool:
            return await self._is_wanted(job)

        async def on_delayed(reason: str) -> None:
            await self._delayed(job_id, reason)

        if not await self.may_start(job) or not await self._may_retry(job):
            await self.end_if_exited(job_id)
            return
        left_s = rules.start_deadline_left_s(job, self._state.now())
        request = LeaseRequest(
            request_id=f"r_{job_id}.driver" + (f".{job.attempt}" if job.attempt > 1 else ""),
            owner_id=OWNER,
            demand=demand_of(job),
            wait_s=max(0.0, min(POLL_S, left_s)),
            driver=DriverSpec(
                job_id=job_id, entrypoint=job.entrypoint, env=_array_env(job), attempt=job.attempt
            ),
        )
        result = await request_lease(
            self._peers, request, still_wanted=still_wanted, on_delayed=on_delayed
        )
        if isinstance(result, Refused):
            message = str(result.error)
            await self._jobs.end(job_id, JobState.FAILED, message=message, attempt=job.attempt)
        elif result is not None:
            await self._record(job, result)
        else:
            await self.end_if_exited(job_id)

    async def _may_retry(self, job: Job) -> bool:
        try:
            may = await self._work.before_retry(job)
        except StokerError as error:
            await self._delayed(job.job_id, str(error))
            raise
        if may and job.attempts and job.message:  # what it waited for until now
            await self._delayed(job.job_id, rules.WAITS_FOR_NODE)
        return may

    async def _is_wanted(self, job: Job) -> bool:
        """Return whether an attempt still waits for its start; one whose start deadline has passed fails."""
        current = await self._state.get(JOBS, job.job_id)
        if rules.start_deadline_left_s(current, self._state.now()) <= 0:
            current = await self._jobs.end_late(job.job_id)
        waits = not current.state.terminal and not current.lease_id
        return waits and current.attempt == job.attempt

    async def _delayed(self, job_id: str, reason: str) -> None:
        await self._state.change(JOBS, job_id, lambda current: rules.delayed(current, reason))

    async def may_start(self, job: Job) -> bool:
        """Wait for the jobs to run after; end the job, and return False, if one ended otherwise or late."""
        if not await self._is_wanted(job):
            return False
        for dependency in job.after if job.attempt == 1 else ():
            other: Job | None = None
            while await self._is_wanted(job):
                try:
                    other = await self._state.wait_for(
                        JOBS, dependency.job_id, lambda one: one.state.terminal, FIRST_POLL_S
                    )
                except NotFoundError:
                    break
                if other.state.terminal:
                    break
                reason = f"waits for the end of job {other.job_id}, which is {other.state}"
                await self._delayed(job.job_id, reason)
            else:
                return False
            failure = rules.dependency_failure(dependency, other)
            if failure:
                await self._jobs.end(job.job_id, JobState.FAILED, message=failure)
                return False
        return True

    async def _record(self, placed: Job, granted: GrantedLease) -> None:
        job_id, now = placed.job_id, self._state.now()
        job = await self._state.change(
            JOBS, job_id, lambda current: rules.launched(current, granted, now, placed.attempt)
        )
        if job.lease_id != granted.lease.lease_id:
            self._releaser.start(granted.lease.lease_id, f"job {job_id} is {job.state}")
            return
        await self.end_if_exited(job_id)

    async def end_if_exited(self, job_id: str) -> None:
        """End an attempt whose driver exited before its start was recorded.

        Whoever recorded it may have been stopped, or have lost its leadership, before it could look.
        """
        job = await self._jobs.find(job_id)
        if job is None or job.state is not JobState.RUNNING or not job.worker_id:
            return
        exit_ = await find_exit(self._state, job.worker_id)
        if exit_ is not None:
            await self._jobs.worker_exited(
                msgspec.structs.replace(exit_, lease_id=job.lease_id, job_id=job_id)
            )


def _array_env(job: Job) -> dict[str, str]:
    if not job.array_id:
        return {}
    return {"STOKER_ARRAY_ID": job.array_id, "STOKER_ARRAY_INDEX": str(job.array_index)}


def demand_of(job: Job) -> Demand:
    """Return what the driver of a submitted job needs.

    What has run once waits for nodes to come back, unless there is one node only that it may run on.
    """
    return Demand(
        job_id=job.job_id,
        resources=job.resources,
        kind=LeaseKind.DRIVER,
        preemptible=job.preemptible,
        preemption_grace_s=job.preemption_grace_s,
        runtime_env=job.runtime_env,
        label_selector=job.label_selector,
        strategy=Strategy(node_id=job.only_node_id or None),
        on_infeasible=OnInfeasible.WAIT
        if job.attempts and not job.only_node_id
        else OnInfeasible.ERROR,
        node_filter=job.node_filter,
        tolerations=job.tolerations,
        name=job.name or "driver",
    )
