"""The caller's side of leases: which worker gets which call, and that none is lost or doubled."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.runtime.tasks.dispatch import MAX_DEPTH, PIPELINE_S, REPORT_S, STALE_S, ClassQueue


@dataclass
class Function:
    mean_s: float | None = None


@dataclass(eq=False)
class Task:
    task_id: str
    exclusive: bool = False
    function: Function = field(default_factory=Function)
    fairness_key: str = ""

    @property
    def expected_s(self) -> float | None:
        return self.function.mean_s

    def record_duration(self, duration_s: float) -> None:
        self.function.mean_s = duration_s


def queue_of(count: int, slots: int = 1, *, exclusive: bool = False) -> ClassQueue[Task]:
    queue: ClassQueue[Task] = ClassQueue()
    for i in range(slots):
        queue.add_slot(f"l{i}", None, 0.0)
    function = Function()
    for i in range(count):
        queue.ready.append(Task(f"t{i}", exclusive, function))
    return queue


def sent(queue: ClassQueue[Task], now_s: float = 0.0) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for slot, batch in queue.dispatch(now_s):
        found.setdefault(slot.lease_id, []).extend(t.task_id for t in batch)
    return found


def teach(queue: ClassQueue[Task], duration_s: float) -> None:
    for task in queue.ready:
        task.record_duration(duration_s)


def test_the_first_call_goes_alone_because_its_length_is_unknown() -> None:
    queue = queue_of(5)
    assert sent(queue) == {"l0": ["t0"]}
    assert len(queue.ready) == 4


def test_short_calls_are_sent_by_the_hundred_and_long_ones_singly() -> None:
    for duration_s, depth in ((1e-9, MAX_DEPTH), (20e-6, 250), (PIPELINE_S, 2), (1.0, 1)):
        queue = queue_of(1000)
        teach(queue, duration_s)
        assert abs(len(sent(queue)["l0"]) - depth) <= (depth > 2), duration_s


def test_depth_follows_the_measured_length() -> None:
    queue = queue_of(1000)
    (slot,) = queue.slots.values()
    assert len(sent(queue)["l0"]) == 1
    queue.complete(slot, "t0", 20e-6, 0.0)
    assert 240 < len(sent(queue)["l0"]) <= 250
    for task_id in list(slot.inflight):
        queue.complete(slot, task_id, 0.5, 0.0)
    assert len(sent(queue)["l0"]) == 1


def test_a_function_not_measured_yet_waits_for_an_empty_worker_whatever_others_take() -> None:
    queue = queue_of(3)
    teach(queue, 20e-6)
    queue.ready.append(Task("new"))
    queue.ready.append(Task("newer"))
    assert sent(queue) == {"l0": ["t0", "t1", "t2"]}
    assert queue.leases_wanted == 2


def test_work_is_shared_evenly() -> None:
    queue = queue_of(100, slots=4)
    teach(queue, 20e-6)
    assert {k: len(v) for k, v in sent(queue).items()} == {f"l{i}": 25 for i in range(4)}


def test_a_lease_of_a_spread_class_serves_one_call() -> None:
    queue: ClassQueue[Task] = ClassQueue(spread=True)
    for i in range(5):
        queue.ready.append(Task(f"t{i}", function=Function(20e-6)))
    assert queue.leases_wanted == 5
    for name in ("l0", "l1"):
        queue.add_slot(name, None, 0.0)
    assert sent(queue) == {"l0": ["t0"], "l1": ["t1"]}
    queue.complete(queue.slots["l0"], "t0", 20e-6, 0.0)
    assert sent(queue) == {}
    assert queue.slots["l0"].closing
    assert queue.leases_wanted == 3


def test_closing_and_paused_slots_get_nothing() -> None:
    queue = queue_of(10, slots=3)
    queue.slots["l0"].closing = True
    queue.slots["l1"].paused = True
    assert sent(queue) == {"l2": ["t0"]}


def test_a_call_that_stays_alone_shares_no_worker() -> None:
    queue = queue_of(3, exclusive=True)
    teach(queue, 20e-6)
    assert sent(queue) == {"l0": ["t0"]}
    (slot,) = queue.slots.values()
    assert sent(queue) == {}
    queue.complete(slot, "t0", 20e-6, 0.0)
    queue.ready.append(Task("social", function=Function(20e-6)))
    assert sent(queue) == {"l0": ["t1"]}


def test_nothing_is_sent_behind_a_lone_call_and_it_not_behind_others() -> None:
    queue = queue_of(2, slots=1)
    teach(queue, 20e-6)
    queue.ready.append(Task("lone", exclusive=True, function=Function(20e-6)))
    queue.ready.append(Task("after", function=Function(20e-6)))
    assert sent(queue) == {"l0": ["t0", "t1"]}
    (slot,) = queue.slots.values()
    queue.complete(slot, "t0", 20e-6, 0.0)
    assert sent(queue) == {}
    queue.complete(slot, "t1", 20e-6, 0.0)
    assert sent(queue) == {"l0": ["lone"]}
    assert sent(queue) == {}


def test_taken_back_calls_wait_in_front_in_their_order() -> None:
    queue = queue_of(6)
    teach(queue, PIPELINE_S / 4)
    assert sent(queue) == {"l0": ["t0", "t1", "t2", "t3"]}
    slot = queue.slots["l0"]
    assert [t.task_id for t in queue.return_unstarted(slot, ["t2", "t3"])] == ["t2", "t3"]
    assert [t.task_id for t in queue.ready] == ["t2", "t3", "t4", "t5"]
    assert slot.paused, "the calls before them run still"
    assert sent(queue) == {}
    queue.complete(slot, "t0", PIPELINE_S / 4, 0.0)
    assert not slot.paused


def test_a_single_call_does_not_wait_for_those_of_another_flow() -> None:
    queue = queue_of(10_000)
    teach(queue, 100e-6)
    queue.ready.append(Task("single", function=Function(100e-6), fairness_key="other"))
    order = [task_id for ids in sent(queue).values() for task_id in ids]
    assert order[10] == "single", "after one turn of the flood"
    assert order[:10] + order[11:] == [f"t{i}" for i in range(49)], "which goes on in its order"


def test_flows_share_by_work_and_not_by_number_of_calls() -> None:
    queue: ClassQueue[Task] = ClassQueue()
    queue.add_slot("l0", None, 0.0)
    for i in range(1000):
        queue.ready.append(Task(f"short{i}", function=Function(50e-6), fairness_key="short"))
        queue.ready.append(Task(f"long{i}", function=Function(500e-6), fairness_key="long"))
    (order,) = sent(queue).values()
    assert [sum(i.startswith(k) for i in order) for k in ("short", "long")] == [60, 4]


def test_what_waits_and_is_cancelled_is_never_sent_wherever_it_was() -> None:
    queue = queue_of(6)
    teach(queue, PIPELINE_S / 10)
    single = Task("single", fairness_key="other")
    queue.ready.append(single)
    for task in [t for t in queue.ready if t.task_id in ("t0", "t1", "t3", "t5")]:
        queue.ready.drop(task)
    queue.ready.drop(single)
    assert [t.task_id for t in queue.ready] == ["t2", "t4"]
    assert sent(queue) == {"l0": ["t2", "t4"]}
    assert not queue.ready


def test_a_tail_behind_a_slow_call_is_revoked() -> None:
    queue = queue_of(4)
    teach(queue, PIPELINE_S / 4)
    sent(queue)
    assert list(queue.to_revoke(STALE_S / 2)) == []
    late = STALE_S * 2
    assert [(s.lease_id, ids) for s, ids in queue.to_revoke(late)] == [("l0", ["t1", "t2", "t3"])]


def test_the_first_call_of_a_slot_is_reported_once_when_it_runs_for_long() -> None:
    queue = queue_of(3)
    teach(queue, PIPELINE_S / 4)
    ((slot, tasks),) = list(queue.dispatch(1.0))
    assert list(queue.long_running(1.0 + REPORT_S / 2)) == []
    assert list(queue.long_running(1.0 + REPORT_S)) == [(tasks[0], REPORT_S)]
    assert list(queue.long_running(9.0)) == []
    queue.complete(slot, tasks[0].task_id, 8.0, 9.0)
    assert list(queue.long_running(9.5)) == []
    assert list(queue.long_running(11.0)) == [(tasks[1], 2.0)]
    queue.return_unstarted(slot, [tasks[2].task_id])
    assert list(queue.long_running(12.0)) == []


def test_idle_slots_are_those_that_rest_long_enough_while_nothing_waits() -> None:
    queue = queue_of(0, slots=2)
    assert {s.lease_id for s in queue.idle_slots(1.0, 0.5)} == {"l0", "l1"}
    assert queue.idle_slots(0.4, 0.5) == []
    queue.ready.append(Task("t"))
    assert queue.idle_slots(1.0, 0.5) == []


def test_a_dropped_slot_gives_back_what_it_had() -> None:
    queue = queue_of(3)
    teach(queue, 20e-6)
    sent(queue)
    assert [t.task_id for t in queue.drop_slot("l0")] == ["t0", "t1", "t2"]
    assert queue.drop_slot("l0") == []


def test_wanted_grows_with_the_queue_and_shrinks_with_short_calls() -> None:
    assert queue_of(0).leases_wanted == 0
    assert queue_of(10).leases_wanted == 10
    queue = queue_of(100)
    teach(queue, 20e-6)
    assert queue.leases_wanted == 1
    teach(queue, 1.0)
    assert queue.leases_wanted == 100
    teach(queue, 0.0)  # as a call that was cancelled by force
    assert queue.leases_wanted == 1


class Dispatching(RuleBasedStateMachine):
    """Any order of events leaves each call in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ClassQueue[Task] = ClassQueue()
        self.tasks: dict[str, Task] = {}
        self.done: set[str] = set()
        self.lost: list[Task] = []
        self.now_s = 0.0
        self.slots_made = 0
        self.functions = (Function(), Function())

    def inflight(self) -> list[tuple[str, str]]:
        return [(s.lease_id, i) for s in self.queue.slots.values() for i in s.inflight]

    @rule(exclusive=st.booleans(), count=st.integers(1, 20))
    def submit(self, exclusive: bool, count: int) -> None:
        for _ in range(count):
            number = len(self.tasks) % 2
            task = Task(f"t{len(self.tasks)}", exclusive, self.functions[number], f"flow {number}")
            self.tasks[task.task_id] = task
            self.queue.ready.append(task)

    @rule()
    def grant(self) -> None:
        self.queue.add_slot(f"l{self.slots_made}", None, self.now_s)
        self.slots_made += 1

    @rule()
    def pump(self) -> None:
        for slot, batch in self.queue.dispatch(self.now_s):
            assert batch
            assert not slot.closing
            assert not slot.paused
            assert len(slot.inflight) <= MAX_DEPTH
            assert len(slot.inflight) == 1 or not any(t.exclusive for t in slot.inflight.values())

    @precondition(lambda self: self.inflight())
    @rule(data=st.data(), duration_s=st.sampled_from([1e-5, 1e-3, 0.1]))
    def finish(self, data: st.DataObject, duration_s: float) -> None:
        lease_id, task_id = data.draw(st.sampled_from(self.inflight()))
        slot = self.queue.slots[lease_id]
        assert self.queue.complete(slot, task_id, duration_s, self.now_s) is self.tasks[task_id]
        assert self.queue.complete(slot, task_id, duration_s, self.now_s) is None
        self.done.add(task_id)

    @precondition(lambda self: self.inflight())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease_id, _ = data.draw(st.sampled_from(self.inflight()))
        slot = self.queue.slots[lease_id]
        self.queue.return_unstarted(slot, [*list(slot.inflight)[1:], "unknown"])

    @precondition(lambda self: self.queue.slots)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.lost += self.queue.drop_slot(data.draw(st.sampled_from(sorted(self.queue.slots))))

    @precondition(lambda self: self.queue.slots)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.queue.slots[data.draw(st.sampled_from(sorted(self.queue.slots)))].closing = True

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def requeue_lost(self) -> None:
        for task in self.lost:
            self.queue.ready.append(task)
        self.lost.clear()

    @precondition(lambda self: self.queue.ready)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(t.task_id for t in self.queue.ready)))
        self.queue.ready.drop(self.tasks[task_id])
        self.done.add(task_id)

    @invariant()
    def each_task_is_in_one_place(self) -> None:
        places = list(
            chain(
                (t.task_id for t in self.queue.ready),
                (i for _, i in self.inflight()),
                (t.task_id for t in self.lost),
                self.done,
            )
        )
        assert sorted(places) == sorted(self.tasks)
        assert len(self.queue.ready) == len(list(self.queue.ready))

    @invariant()
    def wanted_is_sane(self) -> None:
        assert 0 <= self.queue.leases_wanted <= max(len(self.queue.ready), 0)

    @invariant()
    def what_is_revoked_was_sent(self) -> None:
        for slot, ids in self.queue.to_revoke(self.now_s):
            assert set(ids) < set(slot.inflight)


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_share_wants_no_more_leases_than_it_may_have() -> None:
    queue: ClassQueue[Task] = ClassQueue(max_slots=3)
    function = Function()
    for number in range(10):
        queue.ready.append(Task(f"t{number}", function=function))
    assert queue.leases_wanted == 3
    queue.add_slot("l0", object(), 0.0)
    queue.add_slot("l1", object(), 0.0)
    assert queue.leases_wanted == 1
    queue.add_slot("l2", object(), 0.0)
    assert queue.leases_wanted == 0
