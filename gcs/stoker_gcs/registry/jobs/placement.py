"""Placement of the drivers of submitted jobs: a lease of kind ``driver``.

Runs on the leading replica, started by the reconciler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.leases import OWNER, POLL_S, Refused, request_lease
from stoker_gcs.registry.worker_exits import find_exit
from stoker_wire.messages.cluster import Demand, DriverSpec, LeaseKind, LeaseRequest
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import GrantedLease
    from stoker_wire.messages.work import Job


class DriverPlacement:
    """Placement of drivers: leases a worker for each submitted job, and has its nodelet start the driver."""

    def __init__(
        self, state: StateStore, peers: PeerClients, jobs: JobRegistry, releaser: LeaseReleaser
    ) -> None:
        self._state = state
        self._peers = peers
        self._jobs = jobs
        self._releaser = releaser

    async def place(self, job_id: str) -> None:
        """Start the driver of one submitted job, or end the job with the scheduler's reason."""
        job = await self._state.get(JOBS, job_id)

        async def still_wanted() -> bool:
            current = await self._state.get(JOBS, job_id)
            return not current.state.terminal and not current.lease_id

        async def on_delayed(reason: str) -> None:
            await self._state.change(JOBS, job_id, lambda current: rules.delayed(current, reason))

        request = LeaseRequest(
            request_id=f"r_{job_id}.driver",
            owner_id=OWNER,
            demand=demand_of(job),
            wait_s=POLL_S,
            driver=DriverSpec(job_id=job_id, entrypoint=job.entrypoint),
        )
        result = await request_lease(
            self._peers, request, still_wanted=still_wanted, on_delayed=on_delayed
        )
        if isinstance(result, Refused):
            await self._jobs.end(job_id, JobState.FAILED, message=str(result.error))
        elif result is not None:
            await self._record(job_id, result)

    async def _record(self, job_id: str, granted: GrantedLease) -> None:
        now = self._state.now()
        job = await self._state.change(
            JOBS, job_id, lambda current: rules.launched(current, granted, now)
        )
        if job.lease_id != granted.lease.lease_id:
            self._releaser.start(granted.lease.lease_id, f"job {job_id} is {job.state}")
            return
        exit_ = await find_exit(self._state, granted.worker_id)
        if exit_ is not None:
            await self._jobs.worker_exited(
                msgspec.structs.replace(exit_, lease_id=job.lease_id, job_id=job_id)
            )


def demand_of(job: Job) -> Demand:
    """Return what the driver of a submitted job needs."""
    return Demand(
        job_id=job.job_id,
        resources=job.resources,
        kind=LeaseKind.DRIVER,
        runtime_env=job.runtime_env,
        label_selector=job.label_selector,
        name=job.name or "driver",
    )
