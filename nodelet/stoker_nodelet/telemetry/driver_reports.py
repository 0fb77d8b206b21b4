"""Reports of how the drivers of submitted jobs ended, repeated until the gcs has acknowledged them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_wire.errors import NotFoundError, ProtocolError, StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.work import FinishJob, Job, JobState
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import WorkerExit

_AWAY_S = 0.5
_SHOWN_LINES = 20

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DriverReports:
    """Reporter of drivers' ends; it also asks the gcs whether other jobs have ended."""

    gcs: Client
    background: Background

    async def has_ended(self, job_id: str) -> bool:
        """Ask the gcs whether a job has ended, or is forgotten already."""
        try:
            job = await self.gcs.call("GET", f"/v1/jobs/{job_id}", reply=Job)
        except NotFoundError:
            return True
        return job.state.terminal

    def report_exit(self, driver_exit: WorkerExit, attempt: int) -> None:
        """Start to report the end of a driver, that of an attempt of its job."""
        work = self._report(driver_exit, attempt)
        self.background.spawn(work, name=f"finish-{driver_exit.job_id}")

    async def _report(self, driver_exit: WorkerExit, attempt: int) -> None:
        report = FinishJob(
            state=final_state(driver_exit),
            exit_code=exit_code_of(driver_exit),
            message=message_of(driver_exit),
            node_id=driver_exit.node_id,
            attempt=attempt,
            preempted=driver_exit.preempted and driver_exit.exit_code != 0,
        )
        while True:
            try:
                await self.gcs.call("POST", f"/v1/jobs/{driver_exit.job_id}/finish", report)
            except StokerError as error:
                if error.status < 500 and not isinstance(error, ProtocolError):
                    _log.warning("the gcs refused the end of %s: %s", driver_exit.job_id, error)
                    return
                await asyncio.sleep(_AWAY_S)
            else:
                return


def final_state(driver_exit: WorkerExit) -> JobState:
    """Return the state of a job whose driver ended so: an end that was ordered is no failure.

    One that is preempted fails, unless it has finished within its grace.
    """
    if driver_exit.preempted:
        return JobState.SUCCEEDED if driver_exit.exit_code == 0 else JobState.FAILED
    if driver_exit.expected:
        return JobState.STOPPED
    return JobState.SUCCEEDED if driver_exit.exit_code == 0 else JobState.FAILED


def exit_code_of(driver_exit: WorkerExit) -> int | None:
    """Return the exit code of a driver, -N if signal N killed it; None for an end that was ordered."""
    if driver_exit.signal is not None and not driver_exit.expected:
        return -driver_exit.signal
    return driver_exit.exit_code


def message_of(driver_exit: WorkerExit) -> str:
    """Return how the driver ended, in words; a failure shows the last lines it wrote."""
    if driver_exit.exit_code == 0 and not driver_exit.expected:
        return ""
    cause = driver_exit.cause if driver_exit.expected else f"the driver {driver_exit.cause}"
    return "\n".join((cause, *driver_exit.last_log_lines[-_SHOWN_LINES:]))
