"""The state machine of jobs: every transition, and that terminal states absorb."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest

from stoker_gcs.registry.jobs import rules as jobs
from stoker_gcs.store.changes import Delete
from stoker_wire.errors import ConflictError
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.work import (
    AttachDriver,
    FinishJob,
    Job,
    JobState,
    OnePerNode,
    SubmitJob,
)
from tests.unit.gcs.registry.samples import granted


def a_job(state: JobState = JobState.PENDING) -> Job:
    job = jobs.submitted(SubmitJob(entrypoint="x"), "job_1", 1.0)
    return msgspec.structs.replace(job, state=state)


@pytest.mark.parametrize(("state", "end"), list(itertools.product(JobState, JobState)))
def test_a_job_ends_once(state: JobState, end: JobState) -> None:
    transition = jobs.ended(a_job(state), end, 9.0)
    may = end.terminal and not state.terminal
    if state is JobState.PENDING and end is JobState.RUNNING:
        return  # The table has it, but not as an end.
    assert (transition is not None) == may
    if transition is not None:
        assert (transition.record.state, transition.record.ended_at_s, transition.kind) == (
            end,
            9.0,
            "job.finished",
        )
        assert isinstance(transition.operations[0], Delete)


def test_a_driver_attaches_to_a_living_job_only() -> None:
    body = AttachDriver(pid=4)
    transition = jobs.driver_attached(a_job(), body, 2.0)
    assert transition is not None and transition.record.state is JobState.RUNNING
    assert jobs.driver_attached(transition.record, body, 3.0) is None
    with pytest.raises(ConflictError):
        jobs.driver_attached(a_job(JobState.FAILED), body, 2.0)


def test_only_its_drivers_exit_ends_a_submitted_job() -> None:
    transition = jobs.launched(a_job(), granted(), 2.0)
    assert transition is not None
    job = transition.record
    other = WorkerExit(worker_id="w_9", node_id="n_1", lease_id="l_9", exit_code=0)
    assert jobs.driver_exited(job, other, 3.0) is None
    own = WorkerExit(worker_id="w_1", node_id="n_1", lease_id="l_1", exit_code=0)
    done = jobs.driver_exited(job, own, 3.0)
    assert done is not None and done.record.state is JobState.SUCCEEDED
    killed = msgspec.structs.replace(own, exit_code=None, signal=9, cause="killed by SIGKILL")
    died = jobs.driver_exited(job, killed, 3.0)
    assert died is not None
    assert (died.record.state, died.record.exit_code) == (JobState.FAILED, -9)
    assert "signal 9: killed by SIGKILL" in died.record.message


def test_terminal_states_have_no_way_out() -> None:
    assert jobs.TRANSITIONS[JobState.SUCCEEDED] == frozenset()


def running(**options: Any) -> Job:
    body = SubmitJob(entrypoint="x", **options)
    transition = jobs.launched(jobs.submitted(body, "job_1", 1.0), granted(), 2.0)
    assert transition is not None
    return transition.record


FAILED = FinishJob(state=JobState.FAILED, exit_code=1, message="the driver exited with code 1\nlog")


def test_an_attempt_that_failed_is_followed_by_another_while_retries_are_left() -> None:
    job = running(retries=2, retry_delay_s=4.0)
    waiting = jobs.attempt_failed(job, FAILED, 10.0, jitter=0.0)
    assert waiting is not None
    then = waiting.record
    assert (then.state, then.attempt, then.retry_at_s) == (JobState.PENDING, 2, 14.0)
    assert (then.lease_id, then.node_id, then.attempt_started_at_s) == ("", "", None)
    [over] = then.attempts
    assert (over.attempt, over.exit_code, over.started_at_s, over.ended_at_s) == (1, 1, 2.0, 10.0)
    assert over.cause == "the driver exited with code 1" and over.lease_id == job.lease_id
    again = jobs.launched(then, granted(), 15.0, attempt=2)
    assert again is not None
    assert (again.record.started_at_s, again.record.attempt_started_at_s) == (2.0, 15.0)
    third = jobs.attempt_failed(again.record, FAILED, 20.0, jitter=0.0)
    assert third is not None and third.record.retry_at_s == 28.0, "twice as long"
    last = jobs.launched(third.record, granted(), 30.0, attempt=3)
    assert last is not None
    ended = jobs.attempt_failed(last.record, FAILED, 40.0, jitter=0.0)
    assert ended is not None
    assert (ended.record.state, ended.kind) == (JobState.FAILED, "job.finished")


def test_a_driver_that_is_preempted_runs_again_and_uses_up_no_retry() -> None:
    preempted = msgspec.structs.replace(FAILED, preempted=True)
    waiting = jobs.attempt_failed(running(retries=0), preempted, 10.0, jitter=0.0)
    assert waiting is not None and waiting.record.state is JobState.PENDING
    assert (waiting.record.attempt, waiting.record.max_attempts) == (2, 2)
    assert waiting.record.retry_at_s == 10.0, "as soon as there is room"
    assert jobs.retry_delay_s(waiting.record, 0.0) == jobs.retry_delay_s(running(), 0.0)
    again = jobs.attempt_failed(waiting.record, preempted, 20.0, jitter=0.0)
    assert again is not None and again.record.max_attempts == 3
    ended = jobs.attempt_failed(again.record, FAILED, 30.0, jitter=0.0)
    assert ended is not None and ended.record.state is JobState.FAILED


def test_what_is_late_of_an_attempt_changes_nothing() -> None:
    waiting = jobs.attempt_failed(running(retries=5), FAILED, 10.0, jitter=0.0)
    assert waiting is not None
    late = msgspec.structs.replace(FAILED, attempt=1)
    assert jobs.attempt_failed(waiting.record, late, 11.0, jitter=0.0) is None
    assert jobs.launched(waiting.record, granted(), 11.0, attempt=1) is None
    with pytest.raises(ConflictError, match="at attempt 2"):
        jobs.driver_attached(waiting.record, AttachDriver(pid=4, attempt=1), 11.0)
    assert jobs.ended(waiting.record, JobState.STOPPED, 12.0) is not None


@pytest.mark.parametrize("attempt", [1, 3, 50])
def test_the_delay_doubles_up_to_a_limit_and_jitter_halves_it(attempt: int) -> None:
    job = msgspec.structs.replace(running(retries=100, retry_delay_s=10.0), attempt=attempt)
    whole = min(600.0, 10.0 * 2 ** (attempt - 1))
    assert jobs.retry_delay_s(job, 0.0) == whole
    assert jobs.retry_delay_s(job, 1.0) == whole / 2


def test_the_timeout_is_of_all_attempts_and_the_start_deadline_of_the_first() -> None:
    job = running(retries=1, timeout_s=100.0, start_deadline_s=5.0)
    waiting = jobs.attempt_failed(job, FAILED, 50.0, jitter=0.0)
    assert waiting is not None
    assert jobs.timeout_left_s(waiting.record, 60.0) == 42.0
    assert jobs.start_deadline_left_s(waiting.record, 60.0) == math.inf


def test_an_array_on_nodes_has_a_member_for_each() -> None:
    body = SubmitJob(entrypoint="x", one_per_node=OnePerNode(parallelism=1), retries=1)
    started = jobs.array_started(jobs.submitted(body, "job_1", 1.0), 2.0, ["n_1", "n_2"])
    assert started is not None
    members = jobs.members_of(started.record, ["n_1", "n_2"])
    assert [(one.job_id, one.only_node_id) for one in members] == [
        ("job_1.0", "n_1"), ("job_1.1", "n_2"),
    ]  # fmt: skip
    assert all(one.state is JobState.PENDING and not jobs.is_whole(one) for one in members)
    failed = jobs.attempt_failed(started.record, FAILED, 3.0, jitter=0.0)
    assert failed is not None and failed.record.state is JobState.FAILED, "the whole has no retries"
