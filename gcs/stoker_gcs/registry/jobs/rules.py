"""The state machine of a job: pure rules over its record (called by ``jobs.registry``).

=======  ================================  ==========================
from     event                             to
=======  ================================  ==========================
(none)   submitted                         PENDING
(none)   driver attaches                   RUNNING
PENDING  delayed, for another reason       PENDING
PENDING  driver process launched           RUNNING
PENDING  its driver attaches               RUNNING
PENDING  infeasible, or environment fails  FAILED
RUNNING  driver finishes or exits          SUCCEEDED, FAILED
RUNNING  driver or its node is lost        FAILED
both     stopped                           STOPPED
=======  ================================  ==========================

SUCCEEDED, FAILED and STOPPED are terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.leases import upsert_lease_row
from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_gcs.store.changes import Delete
from stoker_wire.errors import ConflictError
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import AttachDriver, Job, JobState, SubmitJob

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import GrantedLease, WorkerExit

JOBS: RecordTable[Job] = RecordTable(
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
_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})
TRANSITIONS = {
    JobState.PENDING: frozenset({JobState.RUNNING}) | _TERMINAL,
    JobState.RUNNING: _TERMINAL,
    JobState.SUCCEEDED: frozenset[JobState](),
    JobState.FAILED: frozenset[JobState](),
    JobState.STOPPED: frozenset[JobState](),
}
_replace = msgspec.structs.replace


def submitted(body: SubmitJob, job_id: str, now_s: float) -> Job:
    """Return the job of a submission."""
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
    """Return the job of a driver that was started by hand."""
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


def driver_attached(job: Job, body: AttachDriver, now_s: float) -> Transition[Job] | None:
    """Attach the driver of a job, perhaps again. A job that has ended takes no driver."""
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
    return None if then == job else Transition(then, _kind_of_start(job))


def _kind_of_start(before: Job) -> EventKind:
    """Return the kind of event: a job starts once, by its driver's launch or attach, whichever is first."""
    return EventKind.JOB_STARTED if before.state is JobState.PENDING else EventKind.JOB_CHANGED


def delayed(job: Job, reason: str) -> Transition[Job] | None:
    """Record why a pending job waits; None if for the same reason as before."""
    if job.state is not JobState.PENDING or job.message == reason:
        return None
    return Transition(_replace(job, message=reason), EventKind.JOB_DELAYED)


def launched(job: Job, granted: GrantedLease, now_s: float) -> Transition[Job] | None:
    """Record that the driver's process was started; None if the job has ended meanwhile."""
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
    return Transition(
        then, _kind_of_start(job), operations=(upsert_lease_row(lease, job_id=job.job_id),)
    )


def ended(
    job: Job,
    state: JobState,
    now_s: float,
    *,
    message: str = "",
    exit_code: int | None = None,
    node_id: str = "",
) -> Transition[Job] | None:
    """End the job and delete its leases; None if it has ended before.

    ``node_id`` is for a driver whose end was reported before its start.
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
    return Transition(
        then, EventKind.JOB_FINISHED, operations=(Delete(schema.LEASES, {"job_id": job.job_id}),)
    )


def driver_exited(job: Job, exit_: WorkerExit, now_s: float) -> Transition[Job] | None:
    """End the job whose submitted driver exited; other workers of the job do not end it."""
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
