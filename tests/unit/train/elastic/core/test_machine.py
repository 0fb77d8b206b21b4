"""The generation machine, step by step, where random worlds come by rarely (tests/sim/training)."""

from __future__ import annotations

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.machine import begin, step
from stoker_train.elastic.core.membership import SetBatch, Slot, Stop, Suspend
from stoker_train.elastic.core.phases import Limits, Phase


def slots(count: int) -> tuple[Slot, ...]:
    return tuple(Slot("g", number, f"n{number}") for number in range(count))


class Job:
    """A machine and what it commanded last; ``form`` has it train with some replicas."""

    def __init__(self, min_replicas: int = 1) -> None:
        self.state = begin("job", Limits(min_replicas=min_replicas, settle_s=90.0, form_s=60.0))
        self.at_s = 0.0
        self.done: list[ev.Command] = []

    def take(self, event: ev.Event) -> list[ev.Command]:
        self.state, commands = step(self.state, event)
        self.done += commands
        return commands

    def offer(self, number: int, count: int) -> None:
        self.take(ev.Offered(self.at_s, number, slots(count), False, self.at_s + 30.0))

    def ready(self, worker: int) -> None:
        self.take(ev.Ready(self.at_s, worker, f"a{worker}", "n", "code"))

    def wrote(self) -> None:
        self.take(ev.Wrote(self.at_s, self.state.generation))

    def formed(self, at: int = 0) -> None:
        for worker in list(self.state.workers):
            self.take(ev.Formed(self.at_s, worker, self.state.generation, at))

    def form(self, count: int) -> list[int]:
        self.offer(1, count)
        for worker in list(self.state.workers):
            self.ready(worker)
        self.wrote()
        self.formed()
        assert self.state.phase is Phase.RUNNING
        return list(self.state.workers)

    def newcomer(self) -> int:
        """A replica more is ready, and the next generation is to be written."""
        self.offer(2, len(self.state.workers) + 1)
        worker = max(self.state.workers)
        self.ready(worker)
        assert self.state.phase is Phase.DRAINING
        return worker

    def turns(self) -> list[str]:
        return [one.after for one in self.done if isinstance(one, ev.Turn)]


def test_a_first_generation_that_never_begins_fails_with_why() -> None:
    job = Job()
    job.offer(1, 1)
    (worker,) = job.state.workers
    job.ready(worker)
    for _ in range(100):
        job.wrote()
        job.take(ev.Broken(0.0, worker, job.state.generation, 0, (), "the checkpoint lacks a key"))
    assert job.state.phase is Phase.FAILED
    assert "the checkpoint lacks a key" in job.state.error


def test_a_rank_that_dies_as_a_first_generation_forms_is_no_reason_to_fail() -> None:
    job = Job()
    job.offer(1, 8)
    first, *others = list(job.state.workers)
    for worker in (first, *others):
        job.ready(worker)
    job.wrote()
    generation = job.state.generation
    job.take(ev.Died(1.0, first, "its node is lost"))
    for worker in others:
        job.take(ev.Broken(1.0, worker, generation, 0, (), "the rendezvous was given up"))
    assert job.state.phase is Phase.FORMING and not job.state.error


def test_a_newcomer_that_dies_before_anyone_knows_of_it_costs_nothing() -> None:
    job = Job()
    job.form(2)
    worker = job.newcomer()
    commands = job.take(ev.Died(1.0, worker, "gone"))
    assert job.state.phase is Phase.RUNNING
    assert not any(isinstance(one, ev.Interrupt | ev.Kill) for one in commands)
    job.wrote()  # of the generation that is not to be
    assert job.state.phase is Phase.RUNNING


def test_a_restart_that_is_asked_for_during_a_resize_comes_after_it() -> None:
    job = Job()
    job.form(1)
    job.newcomer()
    job.wrote()
    job.take(ev.Asked(1.0, Suspend()))
    for worker in list(job.state.workers):
        job.take(ev.Joining(1.0, worker, job.state.generation))
    job.formed(5)
    assert job.turns()[-2:] == [Phase.RUNNING, Phase.DRAINING], "resized, and then suspended"
    assert job.state.suspending


def test_a_job_that_waits_for_replicas_ends_when_it_is_stopped() -> None:
    job = Job(min_replicas=2)
    stays, goes = job.form(2)
    job.take(ev.Granted(1.0, slots(1)))
    job.take(ev.Died(1.0, goes, "its node is lost"))
    job.take(ev.Broken(1.0, stays, 1, 7, (5,), "a peer is gone"))
    assert job.state.pending is None, "it waits for another"
    job.take(ev.Asked(2.0, Stop("enough")))
    job.wrote()
    job.formed(5)
    assert any(isinstance(one, ev.Send) and one.order.kind == "Stop" for one in job.done)


def test_a_decision_holds_where_the_training_goes_back_before_it() -> None:
    job = Job()
    stays, goes = job.form(2)
    job.take(ev.Asked(1.0, SetBatch(64, 32)))
    job.take(ev.Died(2.0, goes, "gone"))
    job.take(ev.Broken(2.0, stays, 1, 7, (5,), "a peer is gone"))
    before = len(job.done)
    job.wrote()
    job.formed(5)
    sent = [one.order.action for one in job.done[before:] if isinstance(one, ev.Send)]
    assert SetBatch(64, 32) in sent


def test_a_decision_that_holds_keeps_to_what_fits_in_memory() -> None:
    job = Job()
    stays, goes = job.form(2)
    job.take(ev.Asked(1.0, SetBatch(64, 32)))
    job.take(ev.OutOfMemory(2.0, goes, 32, 16))
    job.take(ev.Broken(2.0, stays, 1, 7, (5,), "a peer is gone"))
    before = len(job.done)
    job.wrote()
    job.formed(5)
    sent = [one.order.action for one in job.done[before:] if isinstance(one, ev.Send)]
    assert SetBatch(64, 16) in sent and SetBatch(64, 32) not in sent
