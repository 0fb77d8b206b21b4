"""The nodelet's lease machine: its table of cases, and random events against its invariants."""

from __future__ import annotations

import ast
import copy
import random
from pathlib import Path

import pytest

import stoker_nodelet.core
from stoker_nodelet.core import LeaseTerms, Outbox, Policy, State, WorkerPhase, WorkKind, step
from stoker_nodelet.core.commands import (
    AnnounceLease,
    AssignWorker,
    Command,
    ForkWorker,
    RefuseLease,
    RefuseOrder,
    RetireWorker,
    TerminateWorker,
)
from stoker_nodelet.core.events import (
    AssignFailed,
    AttemptEnded,
    CallbacksRegistered,
    Event,
    ForkFailed,
    GpuReading,
    GpuReleased,
    GpusRead,
    JobDeleted,
    JobFinished,
    LeaseRequested,
    LeasesReleased,
    LeasesStopped,
    NodeDrained,
    NodeFenced,
    NodeRegistered,
    RetireAnswered,
    StopAnswered,
    Ticked,
    WorkerAssigned,
    WorkerExited,
    WorkerForked,
    WorkerKillRequested,
    WorkerRegistered,
    WorkerSpent,
)
from stoker_nodelet.core.state import GpuEntry

IMPURE = {
    "stoker_wire",
    "asyncio",
    "os",
    "time",
    "random",
    "pathlib",
    "socket",
    "threading",
    "subprocess",
}


def lease(
    lease_id: str,
    *,
    job: str = "job_1",
    kind: WorkKind = WorkKind.TASK,
    gpus: dict[int, float] | None = None,
    incarnation: int = 1,
) -> LeaseTerms:
    return LeaseTerms(
        lease_id=lease_id, job_id=job, kind=kind, node_incarnation=incarnation, gpus=gpus or {}
    )


class Machine:
    """Feeds events, checks the invariants after each, and keeps the log for a replay."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.state = State(policy=policy or Policy(warm_workers=0))
        self.log: list[Event] = []
        self.count = 0
        self.at_s = 0.0
        self(NodeRegistered(incarnation=1))

    def __call__(self, event: Event) -> list[Command]:
        commands = self.apply(event)
        assert not any(isinstance(command, RefuseOrder) for command in commands), event
        return commands

    def apply(self, event: Event) -> Outbox:
        self.log.append(event)
        commands = step(self.state, event)
        assert self.state.violations() == [], event
        return commands

    def ask(
        self, one: LeaseTerms, *, epoch: int = 1, applicable_after_fork: bool = True, env: str = ""
    ):
        self.count += 1
        return self(LeaseRequested(
            at_s=self.at_s, lease=one, epoch=epoch, env_key=env, applicable_after_fork=applicable_after_fork,
            worker_id=f"w_{self.count}",
        ))  # fmt: skip

    def up(self, worker_id: str) -> list[Command]:
        self(WorkerForked(at_s=self.at_s, worker_id=worker_id, pid=7))
        return self(WorkerRegistered(at_s=self.at_s, worker_id=worker_id, pid=7))

    def release(self, *lease_ids: str, kill: bool = False, epoch: int = 1) -> list[Command]:
        return self(LeasesReleased(at_s=self.at_s, lease_ids=lease_ids, epoch=epoch, kill=kill))

    def gone(self, worker_id: str) -> list[Command]:
        return self(WorkerExited(at_s=self.at_s, worker_id=worker_id, cause="exited"))

    def tick(self, at_s: float) -> list[Command]:
        self.at_s = at_s
        return self(Ticked(at_s=at_s, worker_ids=("w_warm1", "w_warm2")))


def test_a_lease_forks_a_worker_and_is_announced_when_it_registers() -> None:
    m = Machine()
    assert m.ask(lease("l_1")) == [ForkWorker(worker_id="w_1", lease_id="l_1")]
    assert m.ask(lease("l_1")) == []
    assert m.up("w_1") == [AnnounceLease(lease_id="l_1")]
    assert m.up("w_1") == []
    assert m.ask(lease("l_1")) == [AnnounceLease(lease_id="l_1")]


def test_a_worker_of_the_same_job_and_environment_is_used_again() -> None:
    m = Machine()
    m.ask(lease("l_1"))
    m.up("w_1")
    m.release("l_1")
    assert m.ask(lease("l_2", job="job_2")) == [ForkWorker(worker_id="w_2", lease_id="l_2")]
    assert m.ask(lease("l_3"), env="other") == [ForkWorker(worker_id="w_3", lease_id="l_3")]
    assert m.ask(lease("l_4")) == [AssignWorker(worker_id="w_1", lease_id="l_4")]
    assert m(WorkerAssigned(worker_id="w_1", lease_id="l_4")) == [AnnounceLease(lease_id="l_4")]


@pytest.mark.parametrize(
    "one",
    [lease("l_1"), lease("l_1", kind=WorkKind.ACTOR), lease("l_1", gpus={0: 1.0})],
    ids=["a task", "an actor", "a task with a GPU"],
)
def test_a_warm_worker_serves(one: LeaseTerms) -> None:
    m = Machine(Policy(warm_workers=1))
    assert m.tick(1.0) == [ForkWorker(worker_id="w_warm1")]
    m.up("w_warm1")
    assert m.tick(2.0) == []
    assert m.ask(one) == [AssignWorker(worker_id="w_warm1", lease_id="l_1")]
    assert m.tick(3.0) == [ForkWorker(worker_id="w_warm2")]


def test_a_warm_worker_that_is_still_starting_serves_too() -> None:
    m = Machine(Policy(warm_workers=1))
    m.tick(1.0)
    assert m.ask(lease("l_1")) == []
    assert m.up("w_warm1") == [AnnounceLease(lease_id="l_1")]


def test_an_environment_that_needs_another_interpreter_is_never_applied_after_the_fork() -> None:
    m = Machine(Policy(warm_workers=1))
    m.tick(1.0)
    m.up("w_warm1")
    asked = m.ask(lease("l_1"), applicable_after_fork=False)
    assert asked == [ForkWorker(worker_id="w_1", lease_id="l_1")]


@pytest.mark.parametrize("kind", [WorkKind.ACTOR, WorkKind.DRIVER])
def test_actors_and_drivers_are_never_pooled(kind: WorkKind) -> None:
    m = Machine()
    m.ask(lease("l_1", kind=kind))
    m.up("w_1")
    assert [type(c) for c in m.release("l_1")] == [TerminateWorker]
    assert m.release("l_1") == []


def test_a_driver_serves_its_lease_once_it_is_forked() -> None:
    m = Machine()
    m.ask(lease("l_1", kind=WorkKind.DRIVER))
    forked = m(WorkerForked(at_s=0.0, worker_id="w_1", pid=3))
    assert forked == [AnnounceLease(lease_id="l_1")]


def test_a_gpu_is_shared_up_to_one_and_parked_while_its_user_dies() -> None:
    m = Machine()
    third = 1 / 3
    for index in range(3):
        m.ask(lease(f"l_{index}", gpus={0: third}))
        m.up(f"w_{index + 1}")
    (refused,) = m.ask(lease("l_3", gpus={0: 0.1}))
    assert isinstance(refused, RefuseLease)
    assert refused.code == "conflict"
    assert "GPU 0 has 0 left" in refused.message
    m.release("l_0")
    assert m.ask(lease("l_4", gpus={0: third})) == []
    (refused,) = m.ask(lease("l_5", gpus={0: third}))
    assert isinstance(refused, RefuseLease)
    assert m.gone("w_1") == [ForkWorker(worker_id="w_5", lease_id="l_4")]


def test_a_fresh_node_takes_no_orders_of_leaders_before_the_one_at_its_registration() -> None:
    m = Machine()
    m(NodeRegistered(incarnation=2, epoch=4))
    (refused,) = m.ask(lease("l_1", incarnation=2), epoch=3)
    assert isinstance(refused, RefuseLease)
    assert refused.code == "fenced"
    m(NodeRegistered(incarnation=3, epoch=1))  # of a gcs that lags
    assert m.state.epoch == 4


def test_stale_senders_are_fenced_and_late_starts_refused() -> None:
    m = Machine()
    m.ask(lease("l_1"), epoch=3)
    for commands in (
        m.ask(lease("l_2"), epoch=2),
        m.ask(lease("l_2", incarnation=9), epoch=3),
    ):
        (refused,) = commands
        assert isinstance(refused, RefuseLease)
        assert refused.code == "fenced"
    (stale,) = m.apply(LeasesReleased(at_s=0.0, lease_ids=("l_1",), epoch=2))
    assert isinstance(stale, RefuseOrder) and "epoch 2 no longer leads" in stale.message
    assert "l_1" in m.state.leases
    m.release("l_7", epoch=3)
    (refused,) = m.ask(lease("l_7"), epoch=3)
    assert isinstance(refused, RefuseLease)
    assert refused.code == "conflict"


def test_a_failed_assignment_gets_one_worker_of_its_own() -> None:
    m = Machine()
    m.ask(lease("l_1"))
    m.up("w_1")
    m.release("l_1")
    m.ask(lease("l_2"))
    commands = m(AssignFailed(at_s=0.0, worker_id="w_1", lease_id="l_2", reason="no answer"))
    assert commands == [
        TerminateWorker(worker_id="w_1", force=True),
        ForkWorker(worker_id="w_2", lease_id="l_2"),
    ]
    assert m.up("w_2") == [AnnounceLease(lease_id="l_2")]


def test_the_end_of_a_job_spares_actors_only() -> None:
    m = Machine()
    m.ask(lease("l_1"))
    m.ask(lease("l_2", kind=WorkKind.ACTOR))
    m.ask(lease("l_3", kind=WorkKind.DRIVER))
    m.ask(lease("l_4", job="job_2"))
    for worker_id in ("w_1", "w_2", "w_3", "w_4"):
        m.up(worker_id)
    killed = m(JobFinished(at_s=0.0, job_id="job_1"))
    assert [c.worker_id for c in killed if isinstance(c, TerminateWorker)] == ["w_1", "w_3"]
    (refused,) = m.ask(lease("l_5"))
    assert isinstance(refused, RefuseLease)


def test_the_end_of_an_attempt_leaves_its_job_free_to_go_on() -> None:
    m = Machine()
    m.ask(lease("l_1"))
    m.ask(lease("l_2", kind=WorkKind.DRIVER))
    m.up("w_1")
    m.up("w_2")
    killed = m(AttemptEnded(at_s=0.0, job_id="job_1"))
    assert [c.worker_id for c in killed if isinstance(c, TerminateWorker)] == ["w_1", "w_2"]
    assert not any(isinstance(c, RefuseLease) for c in m.ask(lease("l_3")))


def test_a_deleted_jobs_id_is_free_for_another() -> None:
    m = Machine()
    m(JobFinished(at_s=0.0, job_id="job_1"))
    assert isinstance(m.ask(lease("l_1"))[0], RefuseLease)
    m(JobDeleted(job_id="job_1"))
    assert not any(isinstance(c, RefuseLease) for c in m.ask(lease("l_2")))


def test_idle_workers_are_asked_to_leave_and_killed_if_they_linger() -> None:
    m = Machine(Policy(worker_idle_s=10.0, warm_workers=0))
    m.ask(lease("l_1"))
    m.up("w_1")
    m.release("l_1")
    assert m.tick(9.0) == []
    assert m.tick(10.0) == [RetireWorker(worker_id="w_1")]
    m(RetireAnswered(at_s=10.0, worker_id="w_1", leaves=False))
    assert m.state.workers["w_1"].phase is WorkerPhase.IDLE
    assert m.tick(20.0) == [RetireWorker(worker_id="w_1")]
    m(RetireAnswered(at_s=20.0, worker_id="w_1", leaves=True))
    assert m.tick(26.0) == [TerminateWorker(worker_id="w_1", force=True)]


def test_a_node_that_is_drained_keeps_no_idle_worker_while_the_order_is_repeated() -> None:
    m = Machine(Policy(worker_idle_s=60.0, warm_workers=1, spent_retire_s=2.0, drain_order_s=10.0))
    m.ask(lease("l_1"))
    m.up("w_1")
    m.release("l_1")
    m(NodeDrained(at_s=0.0))
    assert m.tick(2.0) == [RetireWorker(worker_id="w_1")], "and none is forked for work to come"
    m(RetireAnswered(at_s=2.0, worker_id="w_1", leaves=False))
    assert m.tick(4.0) == [RetireWorker(worker_id="w_1")]
    m(RetireAnswered(at_s=4.0, worker_id="w_1", leaves=False))
    assert not any(isinstance(one, RetireWorker) for one in m.tick(10.0)), "the order is over"


def test_a_spent_worker_serves_nobody_again_and_stays_while_it_is_needed() -> None:
    m = Machine(Policy(worker_idle_s=60.0, warm_workers=0))
    m.ask(lease("l_1"))
    m.up("w_1")
    m(WorkerSpent(worker_id="w_1"))
    assert m.release("l_1") == [RetireWorker(worker_id="w_1")]
    m(RetireAnswered(at_s=0.0, worker_id="w_1", leaves=False))
    assert m.ask(lease("l_2")) == [ForkWorker(worker_id="w_2", lease_id="l_2")]
    m.up("w_2")
    asked = [at_s for at_s in range(1, 120) if m.tick(float(at_s)) and not m(RetireAnswered(
        at_s=float(at_s), worker_id="w_1", leaves=False
    ))]  # fmt: skip
    assert 4 < len(asked) < 12, "it is asked again, more and more seldom"
    assert m.tick(200.0) == [RetireWorker(worker_id="w_1")]
    assert m(RetireAnswered(at_s=200.0, worker_id="w_1", leaves=True)) == []
    assert m.state.workers["w_1"].phase is WorkerPhase.TERMINATING


def test_a_worker_that_had_a_gpu_stays_without_it_while_others_need_what_it_owns() -> None:
    m = Machine()
    m.ask(lease("l_1", gpus={0: 1.0}))
    m.up("w_1")
    assert m.release("l_1") == [RetireWorker(worker_id="w_1")]
    assert m.ask(lease("l_2", gpus={0: 1.0})) == [], "the worker may still use the device"
    assert m(RetireAnswered(at_s=0.0, worker_id="w_1", leaves=False)) == [
        ForkWorker(worker_id="w_2", lease_id="l_2")
    ]
    assert m.state.workers["w_1"].phase is WorkerPhase.IDLE


@pytest.mark.parametrize(("leaves", "uses_gpus"), [(True, False), (False, True)])
def test_a_worker_that_uses_its_gpu_ends_with_its_lease(leaves: bool, uses_gpus: bool) -> None:
    m = Machine()
    m.ask(lease("l_1", gpus={0: 1.0}))
    m.up("w_1")
    m.release("l_1")
    answer = RetireAnswered(at_s=0.0, worker_id="w_1", leaves=leaves, uses_gpus=uses_gpus)
    assert [type(c) for c in m(answer)] == [TerminateWorker]


def test_a_worker_that_never_registers_is_killed_and_its_lease_refused() -> None:
    m = Machine(Policy(worker_start_s=5.0, warm_workers=0))
    m.ask(lease("l_1"))
    refused, killed = m.tick(6.0)
    assert isinstance(refused, RefuseLease)
    assert isinstance(killed, TerminateWorker)
    assert "did not register within 5 s" in refused.message


def test_a_fenced_node_holds_nothing() -> None:
    m = Machine()
    for index in range(3):
        m.ask(lease(f"l_{index}"))
    m.up("w_1")
    m(NodeFenced(at_s=0.0))
    assert m.state.leases == {}
    for index in (1, 2, 3):
        m.gone(f"w_{index}")
    assert m.state.workers == {}
    (late,) = m.ask(lease("l_late"))  # it was on its way, or prepared, when the node was given up
    assert isinstance(late, RefuseLease) and late.code == "fenced"
    assert m.state.leases == {}


def random_event(rng: random.Random, m: Machine) -> Event:
    m.at_s += rng.random() * 3
    at_s = m.at_s
    workers = sorted(m.state.workers) or ["w_none"]
    worker_id = rng.choice(workers)
    lease_ids = [f"l_{rng.randrange(40)}" for _ in range(rng.randrange(1, 4))]
    worker = m.state.workers.get(worker_id)
    lease_id = worker.lease_id if worker else ""
    match rng.randrange(19):
        case 0 | 1 | 2:
            m.count += 1
            kind = rng.choices(list(WorkKind), (6, 2, 1, 1))[0]
            gpus = rng.choice([{}, {}, {0: 0.5}, {1: 1.0}, {0: 1.0, 1: 0.25}, {2: 1 / 3}])
            one = lease(
                lease_ids[0], job=f"job_{rng.randrange(3)}", kind=kind, gpus=gpus,
                incarnation=rng.choice([1, 1, 1, m.state.incarnation, 5]),
            )  # fmt: skip
            return LeaseRequested(
                at_s=at_s, lease=one, epoch=m.state.epoch + rng.choice([0, 0, 0, -1]),
                env_key=rng.choice("ab"), applicable_after_fork=rng.random() < 0.8, worker_id=f"w_{m.count}",
            )  # fmt: skip
        case 3 | 4:
            return LeasesReleased(
                at_s=at_s, lease_ids=tuple(lease_ids), epoch=m.state.epoch,
                kill=rng.random() < 0.3,
            )  # fmt: skip
        case 5:
            return WorkerForked(at_s=at_s, worker_id=worker_id, pid=1)
        case 6 | 7:
            return WorkerRegistered(at_s=at_s, worker_id=worker_id, pid=1)
        case 8:
            return WorkerAssigned(worker_id=worker_id, lease_id=lease_id)
        case 9:
            return AssignFailed(at_s=at_s, worker_id=worker_id, lease_id=lease_id, reason="x")
        case 10:
            if rng.random() < 0.2:
                return ForkFailed(worker_id=worker_id, reason="x")
            return WorkerExited(at_s=at_s, worker_id=worker_id)
        case 11:
            return Ticked(at_s=at_s, worker_ids=(f"w_t{m.count}_{at_s}",))
        case 12:
            leaves, uses = rng.random() < 0.5, rng.random() < 0.5
            return RetireAnswered(at_s=at_s, worker_id=worker_id, leaves=leaves, uses_gpus=uses)
        case 13:
            return WorkerSpent(worker_id=worker_id)
        case 14:
            return LeasesStopped(
                at_s=at_s, lease_ids=tuple(lease_ids), epoch=m.state.epoch,
                grace_s=rng.random() * 9, reason="x",
            )  # fmt: skip
        case 15:
            if rng.random() < 0.5:
                return CallbacksRegistered(worker_id=worker_id)
            return StopAnswered(
                at_s=at_s, worker_id=worker_id, lease_id=lease_id, callbacks=rng.randrange(2)
            )
        case 16 | 17:
            readings = {
                index: GpuReading(
                    processes=rng.choice([{}, {}, {4711: 1 << 30}]),
                    xids=rng.choice([(), (), (), (13,), (79,)]),
                )
                for index in rng.sample((0, 1), rng.randrange(3))
            }
            if rng.random() < 0.2:
                return GpuReleased(at_s=at_s, index=rng.randrange(3))
            return GpusRead(at_s=at_s, readings=readings)
        case _:
            rare: list[Event] = [
                WorkerKillRequested(at_s=at_s, worker_id=worker_id, reason="x"),
                JobFinished(at_s=at_s, job_id=f"job_{rng.randrange(3)}"),
                AttemptEnded(at_s=at_s, job_id=f"job_{rng.randrange(3)}"),
                JobDeleted(job_id=f"job_{rng.randrange(3)}"),
                NodeRegistered(incarnation=1),
                NodeFenced(at_s=0.0),
            ]
            return rng.choices(rare, (5, 1, 1, 1, 5, 1))[0]


@pytest.mark.parametrize("turn", range(60))
def test_random_events_keep_the_invariants_and_replay_to_the_same_state(
    seed: int, turn: int
) -> None:
    rng = random.Random(f"{seed}/{turn}")
    policy = Policy(
        worker_idle_s=5.0, worker_start_s=8.0, warm_workers=rng.randrange(2), gpu_free_s=6.0
    )
    m = Machine(policy)
    m.state.gpus = {0: GpuEntry(), 1: GpuEntry()}
    start = State(policy=policy, gpus={0: GpuEntry(), 1: GpuEntry()})
    for _ in range(150):
        m(random_event(rng, m))
    again = copy.deepcopy(start)
    for event in m.log:
        step(again, event)
    assert again == m.state
    for worker_id in list(m.state.workers):
        m.gone(worker_id)
    for worker_id in list(m.state.workers):  # those that took the place of parked ones
        m.gone(worker_id)
    assert m.state.gpu_use() == {}


def test_the_core_is_pure() -> None:
    folder = Path(stoker_nodelet.core.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not IMPURE & {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.partition(".")[0] not in IMPURE
