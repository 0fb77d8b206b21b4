"""The ladder that leads to the end of a worker: notice, SIGTERM, SIGKILL, by time alone."""

from __future__ import annotations

from stoker_nodelet.core import LeaseTerms, Policy, Rung, State, WorkerPhase, WorkKind, step
from stoker_nodelet.core.commands import Command, NotifyWorker, RefuseOrder, TerminateWorker
from stoker_nodelet.core.events import (
    CallbacksRegistered,
    JobFinished,
    LeaseRequested,
    LeasesReleased,
    LeasesStopped,
    NodeRegistered,
    StopAnswered,
    Ticked,
    WorkerExited,
    WorkerForked,
    WorkerKillRequested,
    WorkerRegistered,
)

TERM = TerminateWorker(worker_id="w_1", force=False)
KILL = TerminateWorker(worker_id="w_1", force=True)


def leased(kind: WorkKind = WorkKind.TASK) -> State:
    """A machine with lease l_1, served by worker w_1."""
    state = State(policy=Policy(warm_workers=0, term_grace_s=3.0, worker_end_s=5.0))
    step(state, NodeRegistered(incarnation=1))
    terms = LeaseTerms(lease_id="l_1", job_id="job_1", kind=kind, node_incarnation=1)
    step(state, LeaseRequested(
        at_s=0.0, lease=terms, epoch=1, env_key="", applicable_after_fork=True, worker_id="w_1"
    ))  # fmt: skip
    step(state, WorkerForked(at_s=0.0, worker_id="w_1", pid=7))
    if kind is not WorkKind.DRIVER:
        step(state, WorkerRegistered(at_s=0.0, worker_id="w_1", pid=7))
    return state


def stop(state: State, *, grace_s: float = 10.0, epoch: int = 1) -> list[Command]:
    return step(
        state,
        LeasesStopped(at_s=0.0, lease_ids=("l_1",), epoch=epoch, grace_s=grace_s, reason="for x"),
    )


def tick(state: State, at_s: float) -> list[Command]:
    commands = step(state, Ticked(at_s=at_s))
    assert state.violations() == []
    return commands


def test_a_worker_that_ignores_everything_goes_down_the_whole_ladder() -> None:
    state = leased()
    notice = NotifyWorker(worker_id="w_1", lease_id="l_1", grace_s=10.0, reason="for x", saves=True)
    assert stop(state) == [notice]
    assert stop(state, grace_s=1.0) == [], "the first notice counts"
    assert tick(state, 9.9) == [] and "l_1" in state.leases
    assert tick(state, 10.0) == [TERM] and "l_1" not in state.leases
    assert tick(state, 12.9) == []
    assert tick(state, 13.0) == [KILL]
    assert tick(state, 17.9) == []
    assert tick(state, 18.0) == [KILL], "again: it may have been lost"
    worker = state.workers["w_1"]
    assert worker.stop is not None and worker.stop.preempted and worker.reason == "for x"


def test_a_worker_that_has_run_its_callbacks_is_told_to_end_at_once() -> None:
    state = leased()
    stop(state)
    late = StopAnswered(at_s=1.0, worker_id="w_1", lease_id="l_0", callbacks=1)
    assert step(state, late) == [], "that was the notice of another lease"
    none = StopAnswered(at_s=1.0, worker_id="w_1", lease_id="l_1", callbacks=0)
    assert step(state, none) == [], "its code may use the grace to finish"
    done = StopAnswered(at_s=1.0, worker_id="w_1", lease_id="l_1", callbacks=1)
    assert step(state, done) == [TERM]
    assert tick(state, 4.0) == [KILL]


def test_a_lease_that_comes_back_within_its_grace_leaves_its_worker_alive() -> None:
    state = leased()
    stop(state)
    assert step(state, LeasesReleased(at_s=5.0, lease_ids=("l_1",), epoch=1)) == []
    assert state.workers["w_1"].phase is WorkerPhase.IDLE
    assert tick(state, 20.0) == []


def test_the_notice_of_a_driver_is_sigterm() -> None:
    state = leased(WorkKind.DRIVER)
    assert stop(state) == [TERM]
    assert "l_1" in state.leases, "it may still run for its grace"
    assert tick(state, 9.9) == []
    assert tick(state, 10.0) == [KILL] and "l_1" not in state.leases


def test_a_release_ends_a_driver_by_sigterm_and_then_sigkill() -> None:
    state = leased(WorkKind.DRIVER)
    assert step(state, LeasesReleased(at_s=5.0, lease_ids=("l_1",), epoch=1)) == [TERM]
    assert tick(state, 7.9) == []
    assert tick(state, 8.0) == [KILL]


def test_a_kill_goes_to_the_last_rung_and_does_not_forget_the_preemption() -> None:
    state = leased()
    stop(state)
    assert step(state, LeasesReleased(at_s=5.0, lease_ids=("l_1",), epoch=1, kill=True)) == [KILL]
    end = state.workers["w_1"].stop
    assert end is not None and end.rung is Rung.KILL and end.preempted
    step(state, WorkerExited(at_s=6.0, worker_id="w_1"))
    assert tick(state, 30.0) == []


def test_a_worker_with_callbacks_gets_notice_of_any_end_in_order() -> None:
    for end in (
        LeasesReleased(at_s=5.0, lease_ids=("l_1",), epoch=1, kill=True, reason="over"),
        JobFinished(at_s=5.0, job_id="job_1"),
        WorkerKillRequested(at_s=5.0, worker_id="w_1", reason="over", in_order=True),
    ):
        state = leased()
        step(state, CallbacksRegistered(worker_id="w_1"))
        (notice,) = step(state, end)
        assert isinstance(notice, NotifyWorker) and notice.grace_s == 5.0
        assert not notice.saves, "others may have its place already"
        assert state.leases == {}
        assert tick(state, 9.9) == []
        assert tick(state, 10.0) == [TERM]
        assert tick(state, 13.0) == [KILL]
        ended = state.workers["w_1"].stop
        assert ended is not None and not ended.preempted


def test_an_actor_that_saves_its_state_gets_notice_as_its_node_stops() -> None:
    state = leased(WorkKind.ACTOR)
    end = WorkerKillRequested(
        at_s=5.0, worker_id="w_1", reason="its node stops", in_order=True, saves=True
    )
    (notice,) = step(state, end)
    assert isinstance(notice, NotifyWorker) and notice.saves and notice.grace_s == 5.0
    assert tick(state, 9.9) == []
    assert tick(state, 10.0) == [TERM]


def test_a_notice_is_forgotten_with_its_lease() -> None:
    state = leased()
    stop(state)
    step(state, LeasesReleased(at_s=1.0, lease_ids=("l_1",), epoch=1))
    worker = state.workers["w_1"]
    assert worker.stop is None and not worker.saves


def test_the_end_of_a_job_shortens_the_grace_of_a_preemption() -> None:
    state = leased()
    step(state, CallbacksRegistered(worker_id="w_1"))
    stop(state, grace_s=60.0)
    assert step(state, JobFinished(at_s=5.0, job_id="job_1")) == []
    answer = StopAnswered(at_s=6.0, worker_id="w_1", lease_id="l_1", callbacks=0)
    assert step(state, answer) == [TERM]


def test_a_worker_that_does_harm_gets_no_notice() -> None:
    state = leased()
    step(state, CallbacksRegistered(worker_id="w_1"))
    killed = step(state, WorkerKillRequested(at_s=1.0, worker_id="w_1", reason="memory"))
    assert killed == [KILL]


def test_neither_does_one_that_was_to_end_in_order() -> None:
    state = leased()
    step(state, CallbacksRegistered(worker_id="w_1"))
    step(state, WorkerKillRequested(at_s=1.0, worker_id="w_1", reason="kill()", in_order=True))
    killed = step(state, WorkerKillRequested(at_s=1.5, worker_id="w_1", reason="memory"))
    assert killed == [KILL]


def test_a_scheduler_of_the_past_stops_nothing() -> None:
    state = leased()
    assert [type(command) for command in stop(state, epoch=0)] == [RefuseOrder]
    assert state.workers["w_1"].stop is None
