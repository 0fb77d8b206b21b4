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
RUNNING  driver finishes or exits          SUCCEEDED, FAILED, PENDING
RUNNING  driver or its node is lost        FAILED, PENDING
both     timeout                           FAILED
both     stopped                           STOPPED
=======  ================================  ==========================

It is PENDING again when an attempt has failed and retries are left.

SUCCEEDED, FAILED and STOPPED are terminal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stoker_gcs.registry.jobs import elastic_rules
from stoker_gcs.registry.leases import upsert_lease_row
from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_gcs.store.changes import Delete
from stoker_wire.errors import ConflictError
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.common import ANY_NAMESPACE
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.queues import DEFAULT_QUEUE
from stoker_wire.messages.work import (
    After,
    AttachDriver,
    Dependency,
    FinishJob,
    Job,
    JobArray,
    JobAttempt,
    JobState,
    SubmitJob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_wire.messages.cluster import GrantedLease, WorkerExit

JOBS: RecordTable[Job] = RecordTable(
    schema.JOBS,
    Job,
    lambda job: {
        "job_id": job.job_id,
        "state": job.state.value,
        "namespace": job.namespace,
        "node_id": job.node_id,
        "owner": job.user,
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
MAX_RETRY_DELAY_S = 600.0
MAX_CAUSE = 500
WAITS_FOR_NODE = "waits for a node to run its driver"
_replace = msgspec.structs.replace


class Submitter(NamedTuple):
    """The submitter of a job, or of a driver: a person by a token, or a process of another job."""

    user: str = ""
    namespaces: tuple[str, ...] = (ANY_NAMESPACE,)
    token_id: str = ""
    job_id: str = ""
    run_as: str = ""


NOBODY = Submitter()
_OF_REQUEST = (
    *("submitted", "entrypoint", "namespace", "runtime_env", "metadata", "resources", "queue"),
    *("name", "label_selector", "node_filter", "tolerations", "priority", "start_deadline_s"),
    *("timeout_s", "after", "one_per_node", "retries", "retry_delay_s", "preemptible"),
    "preemption_grace_s",
)
"""What a request says of its job, and nothing changes later."""


def is_of_same_request(job: Job, other: Job) -> bool:
    """Return whether two jobs of the same id come from one request, which was sent again."""
    same = all(getattr(job, name) == getattr(other, name) for name in _OF_REQUEST)
    return same and (job.one_per_node is not None or job.array == other.array)


def is_whole(job: Job) -> bool:
    """Return whether a job is a whole array, which has no driver."""
    return job.array is not None or job.one_per_node is not None


def submitted(
    body: SubmitJob, job_id: str, now_s: float, *, by: Submitter = NOBODY, schedule: str = ""
) -> Job:
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
        node_filter=body.node_filter,
        tolerations=body.tolerations,
        created_at_s=now_s,
        message=WAITS_FOR_NODE,
        queue=body.queue or DEFAULT_QUEUE,
        priority=body.priority,
        user=by.user,
        namespaces=by.namespaces,
        run_as=by.run_as,
        parent_job_id=by.job_id,
        start_deadline_s=body.start_deadline_s,
        timeout_s=body.timeout_s,
        after=body.after,
        array=body.array,
        one_per_node=body.one_per_node,
        retries=body.retries,
        retry_delay_s=body.retry_delay_s,
        schedule=schedule,
        preemptible=body.preemptible,
        preemption_grace_s=body.preemption_grace_s,
    )


def members_of(array: Job, node_ids: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of an array's indices, each on its own of ``node_ids`` if there are any.

    What the array waits for, they need not wait for again.
    """
    assert array.array is not None
    return [
        _replace(
            array,
            job_id=f"{array.job_id}.{index}",
            state=JobState.PENDING,
            started_at_s=None,
            namespace=array.namespace
            if array.namespace != array.job_id
            else f"{array.job_id}.{index}",
            message="waits for its turn in the array",
            array=None,
            one_per_node=None,
            only_node_id=node_ids[place] if node_ids else "",
            array_id=array.job_id,
            array_index=index,
            after=(),
            start_deadline_s=None,
        )
        for place, index in enumerate(array.array.indices)
    ]


def array_started(array: Job, now_s: float, node_ids: Sequence[str] = ()) -> Transition[Job] | None:
    """Record that an array has begun; None if it has before, or has ended.

    One that is one per node gets the indices of ``node_ids``.
    """
    if array.state is not JobState.PENDING:
        return None
    then = _replace(array, state=JobState.RUNNING, started_at_s=now_s, message="")
    if array.one_per_node is not None:
        most = array.one_per_node.parallelism
        indices = JobArray(indices=tuple(range(len(node_ids))), parallelism=most)
        then = _replace(then, array=indices)
    return Transition(then, EventKind.JOB_STARTED)


def array_advanced(array: Job, text: str) -> Transition[Job] | None:
    """Record how many members have ended; None if that is known, or the array is over."""
    if array.state is not JobState.RUNNING or array.message == text:
        return None
    return Transition(_replace(array, message=text), EventKind.JOB_CHANGED)


def array_progress(members: Sequence[Job]) -> tuple[str, bool]:
    """Return how far an array is in words, and whether all of its members have succeeded."""
    ended = [job for job in members if job.state.terminal]
    failed = [job for job in ended if job.state is not JobState.SUCCEEDED]
    text = f"{len(ended)} of {len(members)} have ended"
    if failed:
        first = failed[0]
        cause = first.message.partition("\n")[0]
        text += f", {len(failed)} without success, as {first.job_id}: {cause or first.state}"
    return text, len(ended) == len(members) and not failed


def attached(body: AttachDriver, job_id: str, now_s: float, *, by: Submitter = NOBODY) -> Job:
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
        pid_started=body.pid_started,
        pid_namespace=body.pid_namespace,
        queue=body.queue or DEFAULT_QUEUE,
        priority=body.priority,
        user=by.user,
        token_id=by.token_id,
        namespaces=by.namespaces,
        run_as=by.run_as,
        parent_job_id=by.job_id,
    )


def driver_attached(job: Job, body: AttachDriver, now_s: float) -> Transition[Job] | None:
    """Attach the driver of a job, perhaps again. A job that has ended takes no driver."""
    if job.state.terminal:
        raise ConflictError(
            f"job {job.job_id} is {job.state} since "
            f"{(now_s - (job.ended_at_s or now_s)):.0f} s and takes no driver"
        )
    if body.attempt not in (0, job.attempt):
        raise ConflictError(
            f"job {job.job_id} is at attempt {job.attempt} and takes no driver of {body.attempt}"
        )
    then = _replace(
        job,
        state=JobState.RUNNING,
        started_at_s=job.started_at_s or now_s,
        attempt_started_at_s=job.attempt_started_at_s or now_s,
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


def not_ended_text(node_id: str, job_id: str, attempt: int) -> str:
    """Return why the attempt after ``attempt`` does not start yet: a node may still run some of that."""
    return f"node {node_id} has not ended attempt {attempt} of job {job_id} yet"


def start_deadline_left_s(job: Job, now_s: float) -> float:
    """Return the seconds within which a pending job must start; inf without a deadline, and for retries."""
    if job.start_deadline_s is None or job.attempt > 1:
        return math.inf
    return job.created_at_s + job.start_deadline_s - now_s


def too_late(job: Job) -> str:
    """Return why a job ends whose start deadline has passed."""
    return (
        f"its driver did not start within its start deadline of {job.start_deadline_s:g} s\n"
        f"{job.message}"
    )


def dependency_failure(dependency: Dependency, other: Job | None) -> str:
    """Return why a job cannot run after one that has ended, or is gone; empty if it can."""
    if dependency.condition is After.ANY:
        return ""
    if other is None:
        return f"job {dependency.job_id}, which it was to run after, is deleted: how it ended is not known"
    is_ok = other.state is JobState.SUCCEEDED
    if is_ok == (dependency.condition is After.OK):
        return ""
    wanted = "succeeded" if dependency.condition is After.OK else "failed"
    return f"it was to run after job {other.job_id} had {wanted}, and that is {other.state}"


def timeout_left_s(job: Job, now_s: float) -> float:
    """Return the seconds that a job, all its attempts, may go on; inf without a timeout and for an array."""
    if job.timeout_s is None or job.started_at_s is None or is_whole(job):
        return math.inf
    return job.started_at_s + job.timeout_s - now_s


def launched(
    job: Job, granted: GrantedLease, now_s: float, attempt: int = 1
) -> Transition[Job] | None:
    """Record that the driver's process was started; None if the job or this attempt has ended meanwhile."""
    if job.state.terminal or job.attempt != attempt or job.lease_id == granted.lease.lease_id:
        return None
    then = _replace(
        job,
        state=JobState.RUNNING,
        started_at_s=job.started_at_s or now_s,
        attempt_started_at_s=job.attempt_started_at_s or now_s,
        node_id=granted.lease.node_id,
        node_incarnation=granted.lease.node_incarnation,
        lease_id=granted.lease.lease_id,
        worker_id=granted.worker_id,
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
        elastic=elastic_rules.attempt_ended(job.elastic, now_s),
    )
    return Transition(
        then, EventKind.JOB_FINISHED, operations=(Delete(schema.LEASES, {"job_id": job.job_id}),)
    )


def attempt_failed(job: Job, end: FinishJob, now_s: float, jitter: float) -> Transition[Job] | None:
    """End an attempt whose driver failed: another follows if retries are left, or it was preempted."""
    if end.attempt not in (0, job.attempt) or job.state.terminal:
        return None
    is_last = job.attempt >= job.max_attempts and not end.preempted
    if not job.submitted or is_whole(job) or is_last:
        return ended(
            job,
            end.state,
            now_s,
            message=end.message,
            exit_code=end.exit_code,
            node_id=end.node_id,
        )
    over = JobAttempt(
        attempt=job.attempt,
        started_at_s=job.attempt_started_at_s or now_s,
        ended_at_s=now_s,
        cause=end.message.partition("\n")[0][:MAX_CAUSE],
        exit_code=end.exit_code,
        node_id=job.node_id or end.node_id,
        lease_id=job.lease_id,
        preempted=end.preempted,
    )
    elastic = elastic_rules.attempt_ended(job.elastic, now_s)
    delay_s = 0.0 if end.preempted else retry_delay_s(job, jitter)
    next_one = f"the next starts after {delay_s:.1f} s" if delay_s else "the next waits for room"
    then = _replace(
        job,
        state=JobState.PENDING,
        attempt=job.attempt + 1,
        attempts=(*job.attempts, over),
        attempt_started_at_s=None,
        retry_at_s=now_s + delay_s,
        message=f"attempt {over.attempt} failed ({over.cause}); {next_one}",
        node_id="",
        node_incarnation=0,
        lease_id="",
        worker_id="",
        hostname="",
        pid=0,
        elastic=elastic,
    )
    return Transition(
        then, EventKind.JOB_RETRYING, operations=(Delete(schema.LEASES, {"job_id": job.job_id}),)
    )


def retry_delay_s(job: Job, jitter: float) -> float:
    """Return how long after the end of its present attempt the next one starts.

    The delay doubles with each attempt that failed. ``jitter``, from 0 to 1, takes up to half of it away, so
    that what failed together does not come back together.
    """
    longest = max(MAX_RETRY_DELAY_S, job.retry_delay_s)
    failed = job.attempt - 1 - sum(one.preempted for one in job.attempts)
    return min(longest, job.retry_delay_s * 2.0**failed) * (1 - jitter / 2)


def driver_exited(
    job: Job, exit_: WorkerExit, now_s: float, jitter: float = 0.0
) -> Transition[Job] | None:
    """End the attempt whose driver exited; other workers of the job do not end it."""
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
    end = FinishJob(
        state=JobState.FAILED,
        message="\n".join(lines),
        exit_code=code,
        preempted=exit_.preempted,
    )
    return attempt_failed(job, end, now_s, jitter)
