"""The state machine of actors: every transition, and that terminal states absorb."""

from __future__ import annotations

import msgspec
import pytest

from stoker_gcs.registry.actors import rules as actors
from stoker_gcs.registry.leases import RELEASING
from stoker_gcs.store.changes import Update
from stoker_wire.errors import FencedError
from stoker_wire.messages.cluster import Demand, WorkerExit
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import DETACHED_JOB, Actor, ActorState, CreateActor, ReportActor
from tests.unit.gcs.registry.samples import granted

CAUSE = ErrorInfo(code="actor_died", message="why")


def an_actor(state: ActorState = ActorState.PENDING, **more: object) -> Actor:
    body = CreateActor(
        actor_id="a_1", demand=Demand(job_id="job_1", resources={}), class_name="C", payload=b""
    )
    return msgspec.structs.replace(actors.created(body, "ns", 1.0), state=state, **more)


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


def test_the_time_of_earlier_incarnations_is_kept() -> None:
    actor = an_actor(
        ActorState.ALIVE, lease_id="l_1", max_restarts=1, started_at_s=100.0, ran_before_s=7.0
    )
    transition = actors.worker_lost(actor, CAUSE, 110.0, lease_id="l_1")
    assert transition is not None
    assert (transition.record.started_at_s, transition.record.ran_before_s) == (None, 17.0)


def test_a_preempted_actor_comes_back_without_using_up_a_restart() -> None:
    exit_ = WorkerExit(worker_id="w_1", node_id="n_1", cause="preempted for x", preempted=True)
    actor = an_actor(ActorState.ALIVE, lease_id="l_1", max_restarts=0)
    transition = actors.worker_lost(actor, actors.exit_cause(exit_), 2.0, lease_id="l_1")
    assert transition is not None
    record = transition.record
    assert record.state is ActorState.RESTARTING
    assert (record.restarts, record.preemptions, record.incarnation) == (0, 1, 1)
    assert "preempted for x" in record.pending_reason


OOM = ErrorInfo(code="out_of_memory", message="exceeded memory=1")


@pytest.mark.parametrize(
    ("limits", "used", "cause", "comes_back"),
    [
        ((1, 2), (2, 1), OOM, True),
        ((1, 2), (3, 2), OOM, False),
        ((1, 2), (2, 2), CAUSE, True),
        ((1, 2), (1, 0), CAUSE, False),
        ((0, 1), (0, 0), OOM, True),
        ((5, 0), (0, 0), OOM, False),
        ((2, None), (2, 0), OOM, True),
        ((2, None), (2, 2), OOM, False),
        ((-1, None), (90, 90), OOM, True),
        ((0, None), (0, 0), OOM, False),
    ],
)
def test_restarts_after_deaths_for_want_of_memory_are_counted_apart(
    limits: tuple[int, int | None], used: tuple[int, int], cause: ErrorInfo, comes_back: bool
) -> None:
    actor = an_actor(
        ActorState.ALIVE,
        lease_id="l_1",
        max_restarts=limits[0],
        max_oom_restarts=limits[1],
        restarts=used[0],
        oom_restarts=used[1],
    )
    transition = actors.worker_lost(actor, cause, 2.0, lease_id="l_1")
    assert transition is not None
    record = transition.record
    assert record.state is (ActorState.RESTARTING if comes_back else ActorState.DEAD)
    if comes_back:
        assert (record.restarts, record.oom_restarts) == (used[0] + 1, used[1] + (cause is OOM))


def test_a_restart_for_want_of_memory_waits_a_second_at_least() -> None:
    def pause_s(**more: object) -> float:
        actor = an_actor(ActorState.ALIVE, lease_id="l", max_restarts=-1, **more)
        transition = actors.worker_lost(actor, OOM, 2.0, lease_id="l")
        assert transition is not None and transition.record.restart_at_s is not None
        return transition.record.restart_at_s - 2.0

    assert 0.75 <= pause_s(restarts=9) <= 1.25, "other restarts do not lengthen it"
    assert 3.0 <= pause_s(restarts=9, oom_restarts=2) <= 5.0
    assert 7.5 <= pause_s(restart_delay_s=10.0) <= 12.5


def test_a_record_from_before_deaths_for_want_of_memory_were_counted_decodes() -> None:
    old = msgspec.to_builtins(an_actor(ActorState.ALIVE, lease_id="l_1", max_restarts=1))
    del old["max_oom_restarts"], old["oom_restarts"]
    actor = msgspec.convert(old, Actor)
    transition = actors.worker_lost(actor, OOM, 2.0, lease_id="l_1")
    assert transition is not None and transition.record.state is ActorState.RESTARTING


@pytest.mark.parametrize(("max_restarts", "restarts"), [(0, 0), (1, 1)])
def test_an_actor_that_moves_uses_up_no_restart(max_restarts: int, restarts: int) -> None:
    actor = an_actor(
        ActorState.ALIVE,
        lease_id="l_1",
        max_restarts=max_restarts,
        restarts=restarts,
        restart_delay_s=5.0,
    )
    transition = actors.worker_lost(actor, CAUSE, 2.0, lease_id="l_1", moves=True)
    assert transition is not None
    record = transition.record
    assert (record.state, record.death_cause) == (ActorState.RESTARTING, CAUSE)
    assert (record.restarts, record.preemptions, record.restart_at_s) == (restarts, 1, None)


def test_a_record_of_before_the_hooks_is_read_as_one_of_an_actor_without() -> None:
    fields = msgspec.to_builtins(an_actor())
    del fields["saves_state"]
    assert not msgspec.convert(fields, Actor).saves_state


def test_pauses_before_restarts_double_and_a_preempted_actor_has_none() -> None:
    pauses = []
    for restarts in (0, 1, 2, 60):
        actor = an_actor(
            ActorState.ALIVE, lease_id="l", max_restarts=-1, restarts=restarts, restart_delay_s=4.0
        )
        transition = actors.worker_lost(actor, CAUSE, 2.0, lease_id="l")
        assert transition is not None and transition.record.restart_at_s is not None
        pauses.append(transition.record.restart_at_s - 2.0)
        assert actors.waits(transition.record)
    for pause_s, whole_s in zip(pauses, (4.0, 8.0, 16.0, actors.MAX_PAUSE_S), strict=True):
        assert 0.75 * whole_s <= pause_s <= 1.25 * whole_s
    preempted = ErrorInfo(code="preempted", message="for x")
    transition = actors.worker_lost(actor, preempted, 2.0, lease_id="l")
    assert transition is not None and transition.record.restart_at_s is None


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


def test_terminal_states_have_no_way_out() -> None:
    assert actors.TRANSITIONS[ActorState.DEAD] == frozenset()


def test_a_saved_state_is_recorded_once_and_not_from_a_worker_of_the_past() -> None:
    saved = ReportActor(state=ActorState.ALIVE, incarnation=1, state_object="o")
    change = actors.reported(an_actor(ActorState.ALIVE, incarnation=1), saved, 2.0)
    assert change is not None
    assert (change.record.state_object, change.record.saved_at_s) == ("o", 2.0)
    assert actors.reported(change.record, saved, 3.0) is None
    with pytest.raises(FencedError):
        actors.reported(an_actor(ActorState.ALIVE, incarnation=2), saved, 2.0)
