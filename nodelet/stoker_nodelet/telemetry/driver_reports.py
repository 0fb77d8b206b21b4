"""Tells the gcs how the drivers of submitted jobs ended, until it has heard, and asks it of others."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.http.client import Client
from stoker_wire.messages.work import FinishJob, Job, JobState
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import WorkerExit

_AWAY_S = 0.5
_SHOWN_LINES = 20

_log = logging.getLogger("stoker.nodelet.jobs")


@dataclass(slots=True)
class Jobs:
    """Reports of ended drivers on their way to the gcs."""

    gcs: Client
    background: Background

    async def is_over(self, job_id: str) -> bool:
        """Ask the gcs whether a job has ended, or is forgotten already."""
        try:
            job = await self.gcs.call("GET", f"/v1/jobs/{job_id}", reply=Job)
        except NotFoundError:
            return True
        return job.state.terminal

    def driver_exited(self, one: WorkerExit) -> None:
        """Start to report a driver's end."""
        self.background.spawn(self._finish(one), name=f"finish-{one.job_id}")

    async def _finish(self, one: WorkerExit) -> None:
        report = FinishJob(
            state=ended_as(one),
            exit_code=one.exit_code,
            message=message_of(one),
            node_id=one.node_id,
        )
        while True:
            try:
                await self.gcs.call("POST", f"/v1/jobs/{one.job_id}/finish", report)
            except StokerError as error:
                if error.status < 500:
                    _log.warning("the gcs refused the end of %s: %s", one.job_id, error)
                    return
                await asyncio.sleep(_AWAY_S)
            else:
                return


def ended_as(one: WorkerExit) -> JobState:
    """Return the state of a job whose driver ended so: what it was told to do is no failure."""
    if one.expected:
        return JobState.STOPPED
    return JobState.SUCCEEDED if one.exit_code == 0 else JobState.FAILED


def message_of(one: WorkerExit) -> str:
    """Say how it ended; a failure shows the last lines it wrote."""
    if one.exit_code == 0 and not one.expected:
        return ""
    lines = one.last_log_lines[-_SHOWN_LINES:]
    return "\n".join((f"the driver {one.cause}" if not one.expected else one.cause, *lines))
