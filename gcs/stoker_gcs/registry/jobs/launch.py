"""Starts the drivers of submitted jobs: a lease of kind ``driver``, on the leading replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.controllers.lease_requests import OWNER, POLL_S, Refused, exit_of, seek
from stoker_gcs.registry.jobs import rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.messages.cluster import Demand, DriverSpec, LeaseKind, LeaseRequest
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from stoker_gcs.controllers.lease_requests import Releases
    from stoker_gcs.peer_clients import Links
    from stoker_gcs.registry.jobs.registry import JobLedger
    from stoker_gcs.state.records import Truth
    from stoker_wire.messages.cluster import GrantedLease
    from stoker_wire.messages.work import Job


class Launcher:
    """See the module."""

    def __init__(self, truth: Truth, links: Links, ledger: JobLedger, releases: Releases) -> None:
        self._truth = truth
        self._links = links
        self._ledger = ledger
        self._releases = releases

    async def launch(self, job_id: str) -> None:
        """Bring one submitted job to RUNNING, or to its end with the scheduler's reason."""
        job = await self._truth.get(JOBS, job_id)

        async def wanted() -> bool:
            found = await self._truth.get(JOBS, job_id)
            return not found.state.terminal and not found.lease_id

        async def delayed(reason: str) -> None:
            await self._truth.change(JOBS, job_id, lambda found: rules.delayed(found, reason))

        request = LeaseRequest(
            request_id=f"r_{job_id}.driver",
            owner_id=OWNER,
            demand=demand_of(job),
            wait_s=POLL_S,
            driver=DriverSpec(job_id=job_id, entrypoint=job.entrypoint),
        )
        result = await seek(self._links, request, wanted=wanted, delayed=delayed)
        if isinstance(result, Refused):
            await self._ledger.end(job_id, JobState.FAILED, message=str(result.error))
        elif result is not None:
            await self._record(job_id, result)

    async def _record(self, job_id: str, granted: GrantedLease) -> None:
        now = self._truth.now()
        job = await self._truth.change(
            JOBS, job_id, lambda found: rules.launched(found, granted, now)
        )
        if job.lease_id != granted.lease.lease_id:
            self._releases.start(granted.lease.lease_id, f"job {job_id} is {job.state}")
            return
        exit_ = await exit_of(self._truth, granted.worker_id)
        if exit_ is not None:
            await self._ledger.worker_exited(
                msgspec.structs.replace(exit_, lease_id=job.lease_id, job_id=job_id)
            )


def demand_of(job: Job) -> Demand:
    """What the driver of a submitted job needs."""
    return Demand(
        job_id=job.job_id,
        resources=job.resources,
        kind=LeaseKind.DRIVER,
        runtime_env=job.runtime_env,
        label_selector=job.label_selector,
        name=job.name or "driver",
    )
