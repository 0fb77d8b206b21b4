"""Handles of actors: names and namespaces, passing them on, going out of scope, kill."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import actor_record, caught, embedded, until_state
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", "0.3")
        with embedded(tmp_path_factory.mktemp("a"), num_cpus=2, num_gpus=4) as info:
            yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


@stoker.remote
class Counter:
    """Counts, and remembers what it was told."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.said: list[Any] = []

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def say(self, what: Any) -> None:
        self.said.append(what)

    def heard(self) -> list[Any]:
        return self.said

    def pid(self) -> int:
        return os.getpid()


@stoker.remote(num_cpus=0)
def after(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def test_a_handle_may_travel_before_its_actor_is_created() -> None:
    @stoker.remote(num_cpus=0)
    def add(counter: Any) -> int:
        value: int = stoker.get(counter.add.remote())
        return value

    counter = Counter.remote(after.remote(0.5, 41))
    assert get(add.remote(counter)) == 42


def test_an_actor_can_be_killed_while_it_is_being_created() -> None:
    @stoker.remote
    class Endless(Counter.cls):  # type: ignore[misc]
        def __init__(self) -> None:
            threading.Event().wait(GET_S)
            raise AssertionError("it was not killed")

    for _ in range(5):
        counter = Endless.remote()
        ref = counter.add.remote()
        stoker.kill(counter)
        error = caught(lambda ref=ref: get(ref), exceptions.ActorDiedError)
        assert "killed by stoker.kill()" in str(error)
    never = after.remote(30, 1)
    counter = Counter.remote(never)
    ref = counter.add.remote()
    stoker.kill(counter)
    assert isinstance(caught(lambda: get(ref)), exceptions.ActorDiedError)
    stoker.cancel(never, force=True)


def test_a_named_actor_is_found_and_its_name_is_taken_until_it_ends() -> None:
    counter = Counter.options(name="tally").remote(3)
    found = stoker.get_actor("tally")
    assert found == counter
    assert get(found.add.remote()) == 4
    error = caught(lambda: Counter.options(name="tally").remote(), exceptions.ConflictError)
    assert "tally" in str(error)
    assert "get_if_exists" in str(error)
    stoker.kill(counter)
    error = caught(lambda: stoker.get_actor("tally"), exceptions.NotFoundError)
    assert "tally" in str(error)
    again = Counter.options(name="tally").remote(7)
    assert get(again.add.remote()) == 8
    stoker.kill(again)


def test_get_if_exists_without_a_name_is_an_error_at_once() -> None:
    with pytest.raises(exceptions.BadRequestError, match="without a name"):
        Counter.options(get_if_exists=True).remote(1)


def test_get_if_exists_finds_the_first_one() -> None:
    first = Counter.options(name="one", get_if_exists=True).remote(1)
    second = Counter.options(name="one", get_if_exists=True).remote(100)
    assert first == second
    assert get(second.add.remote()) == 2
    stoker.kill(first)


def test_tasks_and_actors_find_names_in_the_namespace_of_their_job() -> None:
    @stoker.remote(num_cpus=0)
    def add_by_name() -> int:
        value: int = stoker.get(stoker.get_actor("known").add.remote())
        return value

    @stoker.remote
    class Finder:
        def make(self, cls: Any) -> str:
            return str(cls.options(name="made").remote(5).actor_id)

    elsewhere = Counter.options(name="known", namespace="elsewhere").remote(100)
    known = Counter.options(name="known").remote(1)
    assert get(add_by_name.remote()) == 2
    finder = Finder.remote()
    made = get(finder.make.remote(Counter))
    assert stoker.get_actor("made").actor_id == made
    for actor in (elsewhere, known, stoker.get_actor("made")):
        stoker.kill(actor)


def test_names_live_in_namespaces() -> None:
    here = Counter.options(name="twin").remote(1)
    there = Counter.options(name="twin", namespace="elsewhere").remote(2)
    assert stoker.get_actor("twin") == here
    assert stoker.get_actor("twin", namespace="elsewhere") == there
    assert here != there
    stoker.kill(here)
    stoker.kill(there)


def test_many_callers_of_get_if_exists_at_once_get_one_actor() -> None:
    @stoker.remote(num_cpus=0)
    def ask(cls: Any) -> str:
        return str(cls.options(name="single", get_if_exists=True).remote().actor_id)

    ids = get([ask.remote(Counter) for _ in range(4)])
    assert len(set(ids)) == 1
    stoker.kill(stoker.get_actor("single"))


def test_handles_work_in_tasks_and_in_other_actors() -> None:
    @stoker.remote(num_cpus=0)
    def add_in_task(counter: Any, amount: int) -> int:
        value: int = stoker.get(counter.add.remote(amount))
        return value

    @stoker.remote
    class Caller:
        def __init__(self, other: Any) -> None:
            self.other = other

        def add(self, amount: int) -> int:
            value: int = stoker.get(self.other.add.remote(amount))
            return value

    counter = Counter.remote()
    caller = Caller.remote(counter)
    assert get(add_in_task.remote(counter, 5)) == 5
    assert get(caller.add.remote(2)) == 7
    assert get(add_in_task.remote([counter][0], 1)) == 8


def test_an_actor_ends_when_the_last_handle_goes_out_of_scope() -> None:
    counter = Counter.remote()
    actor_id, pid = counter.actor_id, get(counter.pid.remote())
    del counter
    record = until_state(actor_id, "DEAD")
    assert "handle" in record["death_cause"]["message"]
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")


def test_calls_submitted_before_the_handle_went_are_done_first() -> None:
    counter = Counter.remote()
    actor_id = counter.actor_id
    refs = [counter.add.remote() for _ in range(200)]
    del counter
    assert get(refs)[-1] == 200
    until_state(actor_id, "DEAD")


def test_a_call_on_a_temporary_handle_is_done() -> None:
    assert get(Counter.remote(4).add.remote()) == 5


def test_a_method_keeps_the_actor_of_a_dropped_handle() -> None:
    counter = Counter.remote()
    add = counter.add
    del counter
    gc.collect()
    assert get([add.remote(), add.remote()]) == [1, 2]


def test_a_method_can_be_passed_on_before_and_after_calls() -> None:
    @stoker.remote(num_cpus=0)
    def call(method: Any) -> Any:
        return stoker.get(method.remote())

    @stoker.remote
    class Target:
        def answer(self) -> int:
            return 42

        def count(self) -> Any:
            yield 1
            yield 2

    target = Target.remote()
    assert get(call.remote(target.answer)) == 42
    assert get(target.answer.remote()) == 42
    assert get(call.remote(target.answer)) == 42
    assert get(call.remote(target.count.options(num_returns=2))) == [1, 2]


def test_kill_fails_what_is_unfinished_and_all_that_follows() -> None:
    @stoker.remote
    class Stuck:
        def wait(self) -> None:
            time.sleep(60)

        def pid(self) -> int:
            return os.getpid()

    stuck = Stuck.remote()
    pid = get(stuck.pid.remote())
    waiting = stuck.wait.remote()
    stoker.kill(stuck)
    error = caught(lambda: get(waiting), exceptions.ActorDiedError)
    assert "stoker.kill()" in str(error)
    assert isinstance(caught(lambda: get(stuck.pid.remote())), exceptions.ActorDiedError)
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")
    stoker.kill(stuck)


def test_refs_that_an_actor_keeps_stay_alive() -> None:
    @stoker.remote
    class Keeper:
        def keep(self, refs: list[Any]) -> None:
            self.refs = refs

        def read(self) -> list[int]:
            return [len(value) for value in stoker.get(self.refs)]

        def make(self) -> list[Any]:
            return [stoker.put(b"x" * 300_000), stoker.put("small")]

    keeper = Keeper.remote()
    get(keeper.keep.remote([stoker.put(b"a" * 10), stoker.put(b"b" * 500_000)]))
    gc.collect()
    # A round trip through the driver's loop: what it would free is freed by now.
    get(after.remote(0.3, None))
    assert get(keeper.read.remote()) == [10, 500_000]
    large, small = get(keeper.make.remote())
    get(after.remote(0.3, None))
    assert (len(get(large)), get(small)) == (300_000, "small")


def test_an_actor_is_listed_with_what_it_is() -> None:
    counter = Counter.options(name="listed", num_cpus=0.5).remote()
    get(counter.add.remote())
    record = until_state(counter.actor_id, "ALIVE")
    assert record["class_name"] == "Counter"
    assert record["name"] == "listed"
    assert record["resources"] == {"CPU": 0.5}
    assert record["pid"] == get(counter.pid.remote())
    stoker.kill(counter)
    assert actor_record(counter.actor_id)["state"] == "DEAD"


@stoker.remote(num_cpus=0)
class Holder:
    """Keeps handles of others."""

    def hold(self, *handles: Any) -> None:
        self.handles: Any = handles

    def let_go(self) -> None:
        del self.handles

    def add(self) -> int:
        value: int = stoker.get(self.handles[0].add.remote())
        return value

    def make(self, cls: Any) -> Any:
        return cls.remote()

    def start_slow(self) -> None:
        """Leave a call behind, and no handle."""
        self.handles[0].slow.remote(self.handles[1])
        del self.handles

    def pid(self) -> int:
        return os.getpid()


def is_alive(actor_id: str) -> bool:
    return bool(actor_record(actor_id)["state"] != "DEAD")


def ends_unheld(actor_id: str) -> None:
    record = until_state(actor_id, "DEAD")
    assert "no handle" in record["death_cause"]["message"]


def test_an_actor_lives_while_any_process_holds_a_handle() -> None:
    counter, holder = Counter.remote(), Holder.remote()
    actor_id = counter.actor_id
    get(holder.hold.remote(counter))
    del counter
    gc.collect()
    assert get(holder.add.remote()) == 1
    get(after.remote(1.0, None))
    assert is_alive(actor_id)
    get(holder.let_go.remote())
    ends_unheld(actor_id)


def test_an_actor_ends_after_it_was_passed_to_tasks() -> None:
    @stoker.remote(num_cpus=0)
    def add(counter: Any) -> int:
        value: int = stoker.get(counter.add.remote())
        return value

    @stoker.remote(num_cpus=0)
    def same(counter: Any) -> Any:
        return [counter]

    counter = Counter.remote()
    actor_id = counter.actor_id
    assert get([add.remote(counter) for _ in range(3)])
    (again,) = get(same.remote(counter))
    del counter
    gc.collect()
    get(after.remote(1.0, None))
    assert get(again.add.remote()) == 4
    del again
    ends_unheld(actor_id)


def test_handles_in_stored_objects_and_closures_count() -> None:
    counter = Counter.remote()
    actor_id = counter.actor_id
    stored = stoker.put({"counter": counter})

    def closure(inner: Any) -> Any:
        @stoker.remote(num_cpus=0)
        def add() -> int:
            value: int = stoker.get(inner.add.remote())
            return value

        return add

    add = closure(counter)
    del counter
    assert get(add.remote()) == 1
    del add, closure
    gc.collect()
    get(after.remote(1.0, None))
    assert is_alive(actor_id)
    assert get(get(stored)["counter"].add.remote()) == 2
    del stored
    gc.collect()
    ends_unheld(actor_id)


def test_a_handle_that_an_actor_returns_counts_and_ends_with_the_actor() -> None:
    holder = Holder.remote()
    dropped, kept = get(holder.make.remote(Counter)), get(holder.make.remote(Counter))
    actor_id = dropped.actor_id
    assert get(dropped.add.remote()) == 1
    del dropped
    ends_unheld(actor_id)
    assert get(kept.add.remote()) == 1
    del holder
    until_state(kept.actor_id, "DEAD")

    def refusal() -> str:
        """A worker may answer for a moment after its end was decided."""
        try:
            get(kept.add.remote())
        except exceptions.ActorDiedError as error:
            return str(error)
        return ""

    assert "its owner, actor Holder" in until(refusal, GET_S, "calls fail")


def test_a_handle_goes_with_the_process_that_held_it() -> None:
    counter, holder = Counter.remote(), Holder.remote()
    actor_id = counter.actor_id
    get(holder.hold.remote(counter))
    del counter
    assert get(holder.add.remote()) == 1
    os.kill(get(holder.pid.remote()), 9)
    ends_unheld(actor_id)


def test_calls_of_other_processes_are_done_before_an_actor_ends(tmp_path: Path) -> None:
    @stoker.remote
    class Slow:
        def slow(self, path: str) -> None:
            until(lambda: os.path.exists(path + ".go"), GET_S, "the test goes on")
            with open(path, "w") as file:
                file.write("done")

    slow, holder = Slow.remote(), Holder.remote()
    actor_id, path = slow.actor_id, str(tmp_path / "file")
    get(holder.hold.remote(slow, path))
    del slow
    get(holder.start_slow.remote())
    gc.collect()
    get(after.remote(1.5, None))
    assert is_alive(actor_id)
    (tmp_path / "file.go").touch()
    ends_unheld(actor_id)
    assert (tmp_path / "file").read_text() == "done"


def test_a_handle_that_somebody_pickled_keeps_its_actor() -> None:
    counter = Counter.remote()
    actor_id, data = counter.actor_id, cloudpickle.dumps(counter)
    del counter
    gc.collect()
    get(after.remote(1.0, None))
    assert is_alive(actor_id)
    again = pickle.loads(data)
    assert get(again.add.remote()) == 1
    stoker.kill(again)


def test_a_handle_whose_owner_died_before_it_created_the_actor() -> None:
    """The handle may be quicker than the request of its owner to the gcs."""
    runtime = stoker.runtime.current.runtime()
    holder = Holder.remote()
    handle = get(holder.make.remote(Counter))
    info = handle._info
    early = type(handle)(type(info)("a_0123456789abcdef", *info.__reduce__()[1][1:]), handle._mark)
    ref = early.add.remote()
    caught(lambda: get(ref, 0.3), exceptions.GetTimeoutError)
    stoker.kill(holder)
    error = caught(lambda: get(ref), exceptions.ActorDiedError)
    assert "died before it had created it" in str(error)
    assert runtime.actors.get("a_0123456789abcdef").dead is not None
