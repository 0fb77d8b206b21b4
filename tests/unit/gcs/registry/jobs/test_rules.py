"""The state machine of jobs: every transition, and that terminal states absorb."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from stoker_gcs.registry.jobs import rules as jobs
from stoker_gcs.store.changes import Delete
from stoker_wire.errors import ConflictError
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.work import AttachDriver, Job, JobState, SubmitJob
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
