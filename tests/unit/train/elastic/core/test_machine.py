"""The generation machine, step by step, where random worlds come by rarely (tests/sim/training)."""

from __future__ import annotations

import pytest

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.machine import begin, step
from stoker_train.elastic.core.membership import SetBatch, Slot, Stop, Suspend
from stoker_train.elastic.core.phases import Limits, Phase
from stoker_train.elastic.core.places import avoided, unwanted
from stoker_train.elastic.core.replacing import spares


def slots(count: int) -> tuple[Slot, ...]:
    return tuple(Slot("g", number, f"n{number}") for number in range(count))


class Job:
    """A machine and what it commanded last; ``form`` has it train with some replicas."""

    def __init__(self, min_replicas: int = 1, max_replicas: int = 8) -> None:
        limits = Limits(min_replicas, max_replicas, settle_s=90.0, form_s=60.0)
        self.state = begin("job", limits)
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


def test_a_rank_that_is_replaced_leaves_once_its_newcomer_is_there_and_its_slot_is_given_back() -> (
    None
):
    job = Job(max_replicas=3)
    slow, stays = job.form(2)
    place = job.state.workers[slow].slot
    assert spares(job.state) == 0
    job.take(ev.Replaced(1.0, slow))
    assert spares(job.state) == 1 and job.state.phase is Phase.RUNNING
    job.at_s = 2.0
    job.offer(2, 3)
    assert spares(job.state) == 1, "the place is asked for until it is used"
    newcomer = max(job.state.workers)
    job.ready(newcomer)
    assert job.state.phase is Phase.DRAINING and job.state.pending is not None
    assert [one.incarnation for one in job.state.pending.members] == [stays, newcomer]
    assert unwanted(job.state) == ()
    job.wrote()
    job.formed(5)
    assert (spares(job.state), unwanted(job.state)) == (0, (place,))
    job.take(ev.Granted(9.0, slots(3)[1:]))
    assert unwanted(job.state) == () and job.state.phase is Phase.RUNNING


def test_a_rank_leaves_before_its_newcomer_where_the_job_may_have_no_more_and_that_is_said() -> (
    None
):
    job = Job(max_replicas=2)
    slow, stays = job.form(2)
    place = job.state.workers[slow].slot
    job.take(ev.Replaced(1.0, slow))
    assert job.state.pending is not None
    assert [one.incarnation for one in job.state.pending.members] == [stays]
    whys = [one.why for one in job.done if isinstance(one, ev.Turn)]
    assert "scaling.max_replicas" in whys[-1]
    job.wrote()
    job.formed(5)
    job.take(ev.Tick(2.0))
    assert unwanted(job.state) == ()
    assert place in {one.slot for one in job.state.workers.values()}, "another starts there"


def test_a_rank_leaves_before_its_newcomer_where_no_place_comes_in_time() -> None:
    job = Job(max_replicas=3)
    slow, _ = job.form(2)
    job.take(ev.Replaced(1.0, slow))
    job.take(ev.Tick(120.0))
    assert job.state.phase is Phase.RUNNING
    job.take(ev.Tick(122.0))
    assert job.state.phase is Phase.DRAINING


def test_a_rank_without_which_too_few_train_is_not_replaced_and_that_is_said() -> None:
    job = Job(min_replicas=2, max_replicas=2)
    slow, _ = job.form(2)
    job.take(ev.Replaced(1.0, slow))
    assert job.state.phase is Phase.RUNNING and not job.state.replaced
    assert any(isinstance(one, ev.Say) and "is not replaced" in one.text for one in job.done)


def fails(job: Job, slot: Slot, at_s: float, why: str) -> None:
    """Have what starts in a slot fail, again and again, until it is in quarantine."""
    while slot not in job.state.quarantined and job.state.phase is not Phase.FAILED:
        starting = [n for n, one in job.state.workers.items() if one.slot == slot]
        for worker in starting:
            job.take(ev.Failed(at_s, worker, why, "start"))
        if slot not in job.state.quarantined:
            at_s += 50.0
            job.take(ev.Tick(at_s))


def test_a_slot_in_quarantine_is_given_back_and_its_node_avoided_while_enough_are_left() -> None:
    job = Job(max_replicas=3)
    job.form(2)
    job.offer(2, 3)
    bad = slots(3)[2]
    fails(job, bad, 2.0, "ImportError: a module")
    assert unwanted(job.state) == (bad,) and avoided(job.state) == {"n2"}
    job.take(ev.Granted(500.0, slots(2)))
    assert unwanted(job.state) == () and avoided(job.state) == {"n2"}, "it is not offered again"


def lacks(job: Job) -> Slot:
    """Have a job of 2 at least lose one of its 2 replicas; return the slot where nothing starts then."""
    stays, goes = job.form(2)
    job.take(ev.Died(1.0, goes, "gone"))
    job.take(ev.Broken(1.0, stays, 1, 7, (5,), "a peer is gone"))
    lost = slots(2)[1]
    fails(job, lost, 2.0, "ImportError: a module")
    return lost


def chance(job: Job, slot: Slot, at_s: float) -> float:
    """Have a slot's pause end, and what starts then fail; return when."""
    job.take(ev.Tick(at_s))
    assert slot not in job.state.quarantined
    (worker,) = [n for n, one in job.state.workers.items() if one.slot == slot]
    job.take(ev.Failed(at_s, worker, "ImportError: a module", "start"))
    assert slot in job.state.quarantined
    return at_s


def test_a_job_that_has_trained_tries_a_slot_it_needs_for_ever_and_wants_another_node() -> None:
    job = Job(min_replicas=2)
    lost, at_s = lacks(job), 1000.0
    assert avoided(job.state) == frozenset(), "one more chance comes first"
    for _ in range(2 * job.state.limits.max_chances):
        at_s = chance(job, lost, at_s)
        assert avoided(job.state) == {"n1"} and unwanted(job.state) == ()
        job.take(ev.Tick(at_s + 1.0))
        assert lost in job.state.quarantined, "not without a pause"
        at_s += job.state.limits.longest_pause_s
    job.take(ev.Tick(at_s))
    assert avoided(job.state) == {"n1"}, "also while it is tried: it may well fail again"
    said = [one.text for one in job.done if isinstance(one, ev.Say)]
    assert any("is tried again" in text and "ImportError" in text for text in said)
    good, other = slots(1)[0], Slot("g2", 0, "n2")
    job.take(ev.Offered(at_s, 9, (good, other), True, at_s + 30.0))
    (worker,) = [n for n, one in job.state.workers.items() if one.slot == other]
    job.take(ev.Ready(at_s, worker, "a9", "n2", "code"))
    job.wrote()
    job.formed(5)
    assert job.state.phase is Phase.RUNNING and job.state.slots == (good, other)


def test_a_node_of_which_nothing_is_left_is_no_longer_avoided_where_no_other_has_room() -> None:
    job = Job(min_replicas=2)
    at_s = chance(job, lacks(job), 1000.0)
    job.take(ev.Granted(at_s, slots(1)))
    job.take(ev.Tick(at_s + job.state.limits.longest_pause_s - 1.0))
    assert avoided(job.state) == {"n1"}
    job.take(ev.Tick(at_s + job.state.limits.longest_pause_s))
    assert avoided(job.state) == frozenset() and not job.state.quarantined


def test_a_slot_that_starts_at_last_is_not_avoided() -> None:
    job = Job(min_replicas=2)
    lost = lacks(job)
    at_s = chance(job, lost, 1000.0) + job.state.limits.longest_pause_s
    job.take(ev.Tick(at_s))
    (worker,) = [n for n, one in job.state.workers.items() if one.slot == lost]
    job.take(ev.Ready(at_s, worker, "a9", "n1", "code"))
    assert avoided(job.state) == frozenset()


@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_that_cannot_start_fails_once_too_few_slots_are_left(count: int) -> None:
    job = Job(min_replicas=2)
    job.offer(1, count)
    at_s = 0.0
    while job.state.phase is Phase.FORMING and at_s < 100.0:
        for worker, one in list(job.state.workers.items()):
            job.take(ev.Failed(at_s, worker, f"ImportError: {one.slot}", "start"))
        at_s += 1.0
        job.take(ev.Tick(at_s))
    assert job.state.phase is Phase.FAILED and at_s < 10.0
    starts = sum(isinstance(one, ev.Launch) for one in job.done)
    assert starts == count * job.state.limits.max_start_failures
    assert all(f"ImportError: {slot}" in job.state.error for slot in slots(count))


def test_a_bad_slot_of_a_job_that_never_trained_has_chances_once_another_is_ready() -> None:
    job = Job(min_replicas=2)
    job.offer(1, 2)
    good, bad = slots(2)
    fails(job, bad, 0.0, "ImportError: a module")
    assert job.state.phase is Phase.FORMING, "the other may be ready yet"
    job.ready(next(n for n, one in job.state.workers.items() if one.slot == good))
    at_s = 1000.0
    for _ in range(job.state.limits.max_chances):
        assert not job.state.error
        at_s = chance(job, bad, at_s) + job.state.limits.longest_pause_s
    assert job.state.phase is Phase.FAILED
    assert "g/1 on n1: ImportError: a module" in job.state.error
