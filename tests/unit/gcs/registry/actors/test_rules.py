"""The state machines of nodes, jobs and actors: every transition, and that terminal states absorb."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from stoker_gcs.registry.actors import rules as actors
from stoker_gcs.registry.jobs import rules as jobs
from stoker_gcs.registry.leases import RELEASING
from stoker_gcs.registry.nodes import rules as nodes
from stoker_gcs.store.changes import Delete, Update
from stoker_wire.errors import ConflictError, FencedError
from stoker_wire.messages.cluster import (
    Demand,
    GrantedLease,
    Lease,
    LeaseKind,
    NodeState,
    RegisterNode,
    WorkerExit,
)
from stoker_wire.messages.common import Address, ErrorInfo
from stoker_wire.messages.work import (
    DETACHED_JOB,
    Actor,
    ActorState,
    AttachDriver,
    CreateActor,
    Job,
    JobState,
    ReportActor,
    SubmitJob,
)

CAUSE = ErrorInfo(code="actor_died", message="why")


def a_job(state: JobState = JobState.PENDING) -> Job:
    job = jobs.submitted(SubmitJob(entrypoint="x"), "job_1", 1.0)
    return msgspec.structs.replace(job, state=state)


def an_actor(state: ActorState = ActorState.PENDING, **more: object) -> Actor:
    body = CreateActor(
        actor_id="a_1", demand=Demand(job_id="job_1", resources={}), class_name="C", payload=b""
    )
    return msgspec.structs.replace(actors.created(body, "ns", 1.0), state=state, **more)


def granted(lease_id: str = "l_1") -> GrantedLease:
    lease = Lease(
        lease_id=lease_id,
        owner_id="gcs",
        job_id="job_1",
        kind=LeaseKind.TASK,
        node_id="n_1",
        node_incarnation=3,
        resources={},
    )
    address = Address("w_1", "n_1", "h", "", "u")
    return GrantedLease(lease=lease, worker_id="w_1", address=address, pid=5)


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


def test_an_actor_is_placed_once_per_incarnation() -> None:
    transition = actors.placed(an_actor(), granted(), 0)
    assert transition is not None and transition.record.address is not None
    assert actors.placed(transition.record, granted("l_2"), 0) is None
    assert actors.placed(an_actor(incarnation=1), granted(), 0) is None
    assert actors.placed(an_actor(ActorState.DEAD), granted(), 0) is None


def test_reports_of_other_incarnations_and_of_the_dead_are_fenced() -> None:
    alive = ReportActor(state=ActorState.ALIVE, incarnation=0)
    with pytest.raises(FencedError):
        actors.reported(an_actor(incarnation=1), alive, 2.0)
    with pytest.raises(FencedError):
        actors.reported(an_actor(ActorState.DEAD), alive, 2.0)
    assert actors.reported(an_actor(ActorState.ALIVE), alive, 2.0) is None


@pytest.mark.parametrize(
    ("max_restarts", "restarts", "comes_back"),
    [(0, 0, False), (1, 0, True), (1, 1, False), (-1, 1000, True)],
)
def test_a_lost_worker_restarts_while_restarts_are_left(
    max_restarts: int, restarts: int, comes_back: bool
) -> None:
    actor = an_actor(ActorState.ALIVE, lease_id="l_1", max_restarts=max_restarts, restarts=restarts)
    transition = actors.worker_lost(actor, CAUSE, 2.0, lease_id="l_1")
    assert transition is not None
    if comes_back:
        assert transition.record.state is ActorState.RESTARTING
        assert (transition.record.incarnation, transition.record.lease_id) == (1, "")
        assert transition.record.last_alive == 0
    else:
        assert (transition.record.state, transition.record.death_cause) == (ActorState.DEAD, CAUSE)
    assert actors.worker_lost(actor, CAUSE, 2.0, lease_id="l_0") is None


@pytest.mark.parametrize("state", [ActorState.PENDING, ActorState.RESTARTING])
def test_a_process_lost_in_its_constructor_was_not_alive(state: ActorState) -> None:
    actor = an_actor(state, lease_id="l_1", max_restarts=1, last_alive=-1)
    transition = actors.worker_lost(actor, CAUSE, 2.0, lease_id="l_1")
    assert transition is not None and transition.record.last_alive == -1


def test_the_dead_absorb_and_running_workers_are_released() -> None:
    actor = an_actor(ActorState.ALIVE, lease_id="l_1")
    transition = actors.died(actor, CAUSE, 2.0, release=True)
    assert transition is not None
    release = transition.operations[0]
    assert isinstance(release, Update) and release.values == {"state": RELEASING}
    assert actors.died(transition.record, CAUSE, 3.0, release=True) is None
    assert actors.worker_lost(transition.record, CAUSE, 3.0, lease_id="l_1") is None


def test_a_detached_actors_lease_belongs_to_no_job() -> None:
    assert actors.lease_job(an_actor(detached=True)) == DETACHED_JOB
    assert actors.lease_job(an_actor()) == "job_1"


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (0.0, NodeState.ALIVE),
        (2.9, NodeState.ALIVE),
        (3.0, NodeState.SUSPECT),
        (10, NodeState.DEAD),
    ],
)
def test_silence_decides_the_state_of_a_node(silent_s: float, state: NodeState) -> None:
    body = RegisterNode(
        node_id="n_1", url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
    )
    node = nodes.registered(body, None, 1.0)
    assert nodes.verdict(node, silent_s, suspect_after_s=3, dead_after_s=10) is state
    dead = nodes.moved(node, NodeState.DEAD, incarnation=1, reason="r", heartbeat_at_s=1.0)
    assert dead is not None
    assert nodes.verdict(dead.record, 0.0, suspect_after_s=3, dead_after_s=10) is NodeState.DEAD
    for to in NodeState:
        assert nodes.moved(dead.record, to, incarnation=1, reason="", heartbeat_at_s=2.0) is None
    assert nodes.registered(body, dead.record, 5.0).incarnation == 2
    with pytest.raises(FencedError):
        nodes.check_incarnation(dead.record, 1)


def test_terminal_states_have_no_way_out() -> None:
    assert jobs.TRANSITIONS[JobState.SUCCEEDED] == frozenset()
    assert actors.TRANSITIONS[ActorState.DEAD] == frozenset()
    assert nodes.TRANSITIONS[NodeState.DEAD] == frozenset()
