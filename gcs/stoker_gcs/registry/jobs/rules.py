"""What may become of a job: pure rules over its record (called by ``jobs.ledger``).

=======  ================================  ==========================
from     event                             to
=======  ================================  ==========================
(none)   submitted                         PENDING
(none)   driver attaches                   RUNNING
PENDING  waits, for another reason         PENDING
PENDING  driver process granted            RUNNING
PENDING  its driver attaches               RUNNING
PENDING  infeasible, or environment fails  FAILED
RUNNING  driver finishes or exits          SUCCEEDED, FAILED
RUNNING  driver or its node is lost        FAILED
both     stopped                           STOPPED
=======  ================================  ==========================

SUCCEEDED, FAILED and STOPPED absorb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.controllers.lease_requests import held
from stoker_gcs.state import schema
from stoker_gcs.state.records import Shelf, Step
from stoker_gcs.store.changes import Delete
from stoker_wire.errors import ConflictError
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.work import AttachDriver, Job, JobState, SubmitJob

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import GrantedLease, WorkerExit

JOBS: Shelf[Job] = Shelf(
    schema.JOBS,
    Job,
    lambda job: {
        "job_id": job.job_id,
        "state": job.state.value,
        "namespace": job.namespace,
        "node_id": job.node_id,
    },
    label="job",
)
_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})
TRANSITIONS = {
    JobState.PENDING: frozenset({JobState.RUNNING}) | _ENDS,
    JobState.RUNNING: _ENDS,
    JobState.SUCCEEDED: frozenset[JobState](),
    JobState.FAILED: frozenset[JobState](),
    JobState.STOPPED: frozenset[JobState](),
}
_replace = msgspec.structs.replace


def submitted(body: SubmitJob, job_id: str, now_s: float) -> Job:
    """The job of a submission."""
    return Job(
        job_id=job_id,
        name=body.name,
        entrypoint=body.entrypoint,
        state=JobState.PENDING,
        submitted=True,
        namespace=body.namespace or job_id,
        runtime_env=body.runtime_env,
        metadata=body.metadata,
        resources=body.resources,
        label_selector=body.label_selector,
        created_at_s=now_s,
        message="waits for a node to run its driver",
    )


def attached(body: AttachDriver, job_id: str, now_s: float) -> Job:
    """The job of a driver that was started by hand."""
    return Job(
        job_id=job_id,
        name="",
        entrypoint=body.entrypoint,
        state=JobState.RUNNING,
        submitted=False,
        namespace=body.namespace or job_id,
        runtime_env=body.runtime_env,
        metadata=body.metadata,
        resources={},
        created_at_s=now_s,
        started_at_s=now_s,
        hostname=body.hostname,
        pid=body.pid,
    )


def joined(job: Job, body: AttachDriver, now_s: float) -> Step[Job] | None:
    """The driver of a job (again) says hello. A job that has ended takes no driver."""
    if job.state.terminal:
        raise ConflictError(
            f"job {job.job_id} is {job.state} since "
            f"{(now_s - (job.ended_at_s or now_s)):.0f} s and takes no driver"
        )
    then = _replace(
        job,
        state=JobState.RUNNING,
        started_at_s=job.started_at_s or now_s,
        hostname=body.hostname or job.hostname,
        pid=body.pid or job.pid,
        message="",
    )
    return None if then == job else Step(then, _started(job))


def _started(before: Job) -> str:
    """A job starts once: by the launch of its driver, or by its hello, whichever is told first."""
    return "job.started" if before.state is JobState.PENDING else "job.changed"


def delayed(job: Job, reason: str) -> Step[Job] | None:
    """A pending job waits for another reason than before."""
    if job.state is not JobState.PENDING or job.message == reason:
        return None
    return Step(_replace(job, message=reason), "job.delayed")


def launched(job: Job, granted: GrantedLease, now_s: float) -> Step[Job] | None:
    """The driver's process was started; None if the job has ended meanwhile."""
    if job.state.terminal or job.lease_id == granted.lease.lease_id:
        return None
    then = _replace(
        job,
        state=JobState.RUNNING,
        started_at_s=job.started_at_s or now_s,
        node_id=granted.lease.node_id,
        lease_id=granted.lease.lease_id,
        pid=granted.pid or job.pid,
        message="",
    )
    lease = _replace(granted.lease, kind=LeaseKind.DRIVER, job_id=job.job_id)
    return Step(then, _started(job), also=(held(lease, job_id=job.job_id),))


def ended(
    job: Job,
    state: JobState,
    now_s: float,
    *,
    message: str = "",
    exit_code: int | None = None,
    node_id: str = "",
) -> Step[Job] | None:
    """The job ends; its leases go with it. None if it has ended before.

    ``node_id`` is for a driver that ended before the gcs was told that it had been started.
    """
    if state not in TRANSITIONS[job.state]:
        return None
    then = _replace(
        job,
        state=state,
        ended_at_s=now_s,
        message=message,
        exit_code=exit_code,
        node_id=job.node_id or node_id,
    )
    return Step(then, "job.finished", also=(Delete(schema.LEASES, {"job_id": job.job_id}),))


def driver_exited(job: Job, exit_: WorkerExit, now_s: float) -> Step[Job] | None:
    """The process of a submitted driver ended; other workers of the job do not end it."""
    if not job.submitted or not job.lease_id or exit_.lease_id != job.lease_id:
        return None
    if exit_.exit_code == 0:
        return ended(job, JobState.SUCCEEDED, now_s, exit_code=0)
    how = f"signal {exit_.signal}" if exit_.signal is not None else f"exit code {exit_.exit_code}"
    lines = [f"the driver ended with {how}"]
    if exit_.cause:
        lines[0] += f": {exit_.cause}"
    lines += exit_.last_log_lines
    code = exit_.exit_code if exit_.signal is None else -exit_.signal
    return ended(job, JobState.FAILED, now_s, message="\n".join(lines), exit_code=code)
