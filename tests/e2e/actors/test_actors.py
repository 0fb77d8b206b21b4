"""Actors as users meet them: order, names, handles, lifetimes, limits and wrong calls."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import caught, embedded, until_state, waits_for
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


def test_an_actor_keeps_its_state_between_calls() -> None:
    counter = Counter.remote(10)
    assert get([counter.add.remote() for _ in range(5)]) == [11, 12, 13, 14, 15]
    assert get(counter.pid.remote()) != os.getpid()


def test_two_actors_of_one_class_live_in_two_processes() -> None:
    first, second = Counter.remote(), Counter.remote()
    get(first.add.remote(5))
    assert get(second.add.remote()) == 1
    assert get(first.pid.remote()) != get(second.pid.remote())


def test_thousands_of_pipelined_calls_run_in_order() -> None:
    counter = Counter.remote()
    for index in range(3000):
        counter.say.remote(index)
    assert get(counter.heard.remote()) == list(range(3000))


def test_calls_wait_in_order_behind_one_whose_argument_comes_late() -> None:
    counter = Counter.remote()
    get(counter.add.remote())
    late = after.remote(0.4, "late")
    counter.say.remote("first")
    counter.say.remote(late)
    counter.say.remote("last")
    assert get(counter.heard.remote()) == ["first", "late", "last"]


def test_a_failed_argument_fails_its_call_and_not_those_behind_it() -> None:
    @stoker.remote(num_cpus=0)
    def broken() -> None:
        raise KeyError("lost")

    counter = Counter.remote()
    told = counter.say.remote(broken.remote())
    counter.say.remote("next")
    assert isinstance(caught(lambda: get(told)), KeyError)
    assert get(counter.heard.remote()) == ["next"]


def test_an_actor_whose_argument_failed_fails_with_that_cause() -> None:
    @stoker.remote(num_cpus=0)
    def broken() -> None:
        raise KeyError("lost")

    counter = Counter.remote(broken.remote())
    assert isinstance(caught(lambda: get(counter.add.remote())), KeyError)


def test_cancelling_a_call_that_waits_for_its_argument_lets_those_behind_it_go() -> None:
    counter = Counter.remote()
    get(counter.add.remote())
    never = after.remote(90, "never")
    stuck = counter.say.remote(never)
    behind = counter.add.remote()
    stoker.cancel(stuck)
    assert isinstance(caught(lambda: get(stuck)), exceptions.TaskCancelledError)
    assert get(behind) == 2
    stoker.cancel(never, force=True)


def test_calls_of_several_threads_all_arrive_each_thread_in_its_order() -> None:
    counter = Counter.remote()

    def caller(name: str) -> None:
        for index in range(200):
            counter.say.remote((name, index))

    threads = [threading.Thread(target=caller, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = get(counter.heard.remote())
    assert len(heard) == 800
    for name in "abcd":
        assert [index for who, index in heard if who == name] == list(range(200))


def test_calls_made_while_the_constructor_is_slow_wait_for_it(tmp_path: Path) -> None:
    go = tmp_path / "go"

    @stoker.remote
    class Slow:
        def __init__(self) -> None:
            until(go.exists, GET_S, "the driver has made its calls")
            self.ready = True

        def look(self) -> bool:
            return self.ready

    slow = Slow.remote()
    refs = [slow.look.remote() for _ in range(100)]
    assert stoker.wait(refs, timeout=0)[0] == [], "remote() does not wait for the constructor"
    until(
        lambda: "its constructor has not returned" in waits_for(refs[-1]), GET_S, "they are there"
    )
    go.touch()
    assert all(get(refs))


def test_a_get_that_passes_its_timeout_says_what_the_actor_is_doing(tmp_path: Path) -> None:
    done = tmp_path / "done"

    @stoker.remote
    class Busy:
        def work(self) -> None:
            until(done.exists, GET_S, "the driver has seen enough")

    busy = Busy.remote()
    ref = busy.work.remote()
    error = caught(lambda: get(ref, timeout=0.3), exceptions.GetTimeoutError)
    assert "Busy.work" in str(error)
    done.touch()
    get(ref)


def test_an_actor_that_no_node_can_ever_run_fails_with_the_reason() -> None:
    @stoker.remote(num_gpus=64)
    class Huge:
        def work(self) -> None:
            return None

    huge = Huge.remote()
    error = caught(lambda: get(huge.work.remote(), timeout=30), exceptions.ActorDiedError)
    assert "GPU" in str(error)
    assert "64" in str(error)


def test_an_actor_waits_for_resources_and_says_so() -> None:
    @stoker.remote(num_gpus=4)
    class All:
        def work(self) -> str:
            return "done"

    first = All.remote()
    assert get(first.work.remote()) == "done"
    second = All.remote()
    error = caught(lambda: get(second.work.remote(), timeout=0.5), exceptions.GetTimeoutError)
    assert "All" in str(error)
    del first
    assert get(second.work.remote()) == "done"


def test_gpu_actors_see_their_own_devices() -> None:
    @stoker.remote(num_gpus=1)
    class OnGpu:
        def devices(self) -> tuple[str | None, list[int]]:
            return os.environ.get("CUDA_VISIBLE_DEVICES"), stoker.get_gpu_ids()

    actors = [OnGpu.remote() for _ in range(4)]
    seen = get([actor.devices.remote() for actor in actors])
    assert sorted(text for text, _ in seen) == ["0", "1", "2", "3"]
    assert all(ids == [int(text)] for text, ids in seen)


def test_an_actor_knows_where_it_runs(cluster: Any) -> None:
    @stoker.remote(num_gpus=0.5)
    class Aware:
        def context(self) -> Any:
            return stoker.get_runtime_context()

    aware = Aware.remote()
    context = get(aware.context.remote())
    assert context.actor_id == aware.actor_id
    assert context.job_id == cluster.job_id
    assert context.node_id == cluster.node_id
    assert context.namespace == cluster.namespace != ""
    assert context.task_name.endswith("Aware.context")
    assert context.get_assigned_resources() == {"GPU": 0.5}
    assert not context.was_current_actor_reconstructed


def test_methods_return_several_values_or_a_stream() -> None:
    @stoker.remote
    class Many:
        @stoker.method(num_returns=2)
        def pair(self) -> tuple[int, int]:
            return 1, 2

        def upto(self, count: int) -> Iterator[int]:
            yield from range(count)

        def wrong(self) -> int:
            return 1

    many = Many.remote()
    first, second = many.pair.remote()
    assert get([first, second]) == [1, 2]
    assert [get(ref) for ref in many.upto.remote(700)] == list(range(700))
    three = many.pair.options(num_returns=1).remote()
    assert get(three) == (1, 2)
    refs = many.wrong.options(num_returns=2).remote()
    assert "num_returns=2" in str(caught(lambda: get(refs)))


def test_a_stream_that_fails_gives_what_it_had_and_then_its_error() -> None:
    @stoker.remote
    class Breaks:
        def upto(self, count: int) -> Iterator[int]:
            yield from range(count)
            raise ValueError("no more")

        def ping(self) -> str:
            return "here"

    breaks = Breaks.remote()
    refs = list(breaks.upto.remote(3))
    assert get(refs[:3]) == [0, 1, 2]
    assert isinstance(caught(lambda: get(refs[3])), ValueError)
    assert get(breaks.ping.remote()) == "here"


def test_a_dropped_stream_of_an_actor_stops_and_the_actor_goes_on() -> None:
    @stoker.remote
    class Endless:
        def count(self) -> Iterator[int]:
            number = 0
            while True:
                number += 1
                yield number

        def ping(self) -> str:
            return "here"

    endless = Endless.remote()
    stream = endless.count.remote()
    assert get(next(stream)) == 1
    del stream
    assert get(endless.ping.remote()) == "here"


def test_an_unknown_method_or_option_names_the_nearest() -> None:
    counter = Counter.remote()
    assert "'add'" in str(caught(lambda: counter.ad, AttributeError))
    error = caught(lambda: Counter.options(max_restart=1), exceptions.UnknownOptionError)
    assert "max_restarts" in str(error)
    error = caught(lambda: counter.add.options(num_return=1), exceptions.UnknownOptionError)
    assert "num_returns" in str(error)
    assert "remote" in str(caught(lambda: Counter(), TypeError))
    assert "remote" in str(caught(lambda: counter.add(), TypeError))
    assert "start" in str(caught(lambda: Counter.remote(begin=1), TypeError))


def passed_on(function: Any) -> Any:
    """A decorator that adds an argument, and says that its wrapper is the function."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, "added", *args, **kwargs)

    return wrapper


@stoker.remote
class Signatures:
    """Methods of every kind, and a constant."""

    LIMIT = 7

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.start = start

    def plain(self, x: int, y: int = 2) -> tuple[int, int]:
        return x, y

    def named(self, *, key: int) -> int:
        return key

    def only(self, x: int, /) -> int:
        return x

    def many(self, *args: int, **kwargs: int) -> int:
        return len(args) + len(kwargs)

    @passed_on
    def decorated(self, added: str, x: int) -> tuple[str, int]:
        return added, x

    @stoker.method(num_returns=1)
    def marked(self, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x + Signatures.LIMIT

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    partial = functools.partialmethod(plain, y=5)
    lower = staticmethod(str.lower)


def test_wrong_arguments_of_a_method_are_a_type_error_at_the_call() -> None:
    actor = Signatures.remote(1)
    wrong = (
        (lambda: actor.plain.remote(), "missing", "(x, y=...)"),
        (lambda: actor.plain.remote(1, 2, 3), "too many", "(x, y=...)"),
        (lambda: actor.plain.remote(1, z=3), "'z'", "(x, y=...)"),
        (lambda: actor.plain.remote(1, x=3), "multiple values", "(x, y=...)"),
        (lambda: actor.named.remote(1), "too many", "(*, key)"),
        (lambda: actor.named.remote(), "missing", "(*, key)"),
        (lambda: actor.only.remote(x=1), "'x'", "(x, /)"),
        (lambda: actor.marked.options(name="m").remote(), "missing", "(x)"),
        (lambda: actor.static.remote(), "missing", "(x)"),
        (lambda: actor.of_class.remote(1, 2), "too many", "(x)"),
        (lambda: Signatures.remote(), "missing", "(start: "),
    )
    for call, why, shown in wrong:
        text = str(caught(call, TypeError))
        assert why in text
        assert shown in text
        assert ".remote()" in text

    @stoker.remote(num_cpus=0)
    def elsewhere(handle: Any) -> str:
        return str(caught(lambda: handle.plain.remote(1, 2, 3), TypeError))

    assert "(x, y=...)" in get(elsewhere.remote(actor))


def test_right_arguments_of_a_method_are_no_error() -> None:
    actor = Signatures.remote(1, step=2)
    calls = {
        actor.plain.remote(1): (1, 2),
        actor.plain.remote(y=3, x=1): (1, 3),
        actor.plain.remote(stoker.put(4)): (4, 2),
        actor.named.remote(key=5): 5,
        actor.only.remote(6): 6,
        actor.many.remote(1, 2, a=3): 3,
        actor.many.remote(): 0,
        actor.decorated.remote(7): ("added", 7),
        actor.marked.remote(8): 8,
        actor.static.remote(1): 8,
        actor.of_class.remote(9): "Signatures 9",
        actor.partial.remote(10): (10, 5),
        actor.lower.remote("ABC"): "abc",
    }
    assert get(list(calls)) == list(calls.values())


def test_a_remote_class_shows_what_its_class_has() -> None:
    assert Signatures.LIMIT == 7
    assert Signatures.static(1) == 8
    assert Signatures.of_class(2) == "Signatures 2"
    assert "LIMITS" in str(caught(lambda: Signatures.LIMITS, AttributeError))


def test_an_attribute_of_the_instance_does_not_hide_a_method() -> None:
    @stoker.remote
    class Account:
        def __init__(self) -> None:
            self.balance = 5
            self.done = False

        def balance(self) -> int:
            return self.balance  # type: ignore[return-value]

        def done(self) -> bool:
            return self.done  # type: ignore[return-value]

    account = Account.remote()
    assert get([account.balance.remote(), account.done.remote()]) == [5, False]


def test_ready_waits_for_the_constructor() -> None:
    @stoker.remote
    class Slow:
        def __init__(self, error: str = "") -> None:
            time.sleep(0.2)
            self.at_s = time.time()
            if error:
                raise OSError(error)

        def started_at_s(self) -> float:
            return self.at_s

    slow = Slow.remote()
    assert get(slow.ready()) is None
    assert get(slow.started_at_s.remote()) <= time.time()
    assert get([slow.ready.remote(), slow.__stoker_ready__.remote()]) == [None, None]
    broken = Slow.remote("no disk")
    assert "no disk" in str(caught(lambda: get(broken.ready()), exceptions.ActorDiedError))


def test_a_method_of_ones_own_named_ready_wins() -> None:
    @stoker.remote
    class Own:
        def ready(self, x: int) -> int:
            return x

    own = Own.remote()
    assert get(own.ready.remote(3)) == 3
    assert "remote" in str(caught(lambda: own.ready(), TypeError))
    assert get(own.__stoker_ready__.remote()) is None
    assert get(own.__stoker_call__.remote(lambda self, y: self.ready(y), 4)) == 4


def test_code_in_an_actor_knows_where_it_runs() -> None:
    @stoker.remote
    class Where:
        def facts(self) -> dict[str, Any]:
            here = stoker.get_runtime_context()
            return {
                "task": here.get_task_name(),
                "function": here.get_task_function_name(),
                "actor": here.get_actor_name(),
                "labels": here.get_node_labels(),
                "namespace": here.namespace,
                "job": here.get_job_id(),
                "cancelled": (here.is_cancelled(), here.is_canceled()),
                "self": here.current_actor,
            }

    name = "where_it_runs"
    where = Where.options(name=name).remote()
    facts = get(where.facts.options(name="look").remote())
    here = stoker.get_runtime_context()
    assert facts["task"] == "look"
    assert facts["function"].endswith("Where.facts")
    assert facts["actor"] == name
    assert facts["labels"] == here.get_node_labels() == stoker.nodes()[0]["labels"]
    assert (facts["namespace"], facts["job"]) == (here.namespace, here.job_id)
    assert facts["cancelled"] == (False, False)
    assert facts["self"] == where
    assert get(facts["self"].facts.remote())["actor"] == name
    assert (here.get_actor_name(), here.get_task_name(), here.is_cancelled()) == (None, None, False)
    assert "no actor" in str(caught(lambda: here.current_actor, exceptions.BadRequestError))
    stoker.kill(where)

    @stoker.remote(num_cpus=0)
    def plain() -> str | None:
        return stoker.get_runtime_context().get_task_function_name()

    assert str(get(plain.remote())).endswith("plain")


def test_max_pending_calls_refuses_more_at_the_call(tmp_path: Path) -> None:
    opened = tmp_path / "opened"

    @stoker.remote(max_pending_calls=3)
    class Gate:
        def wait(self) -> None:
            until(opened.exists, GET_S, "the gate opens")

    gate = Gate.remote()
    refs = [gate.wait.remote() for _ in range(3)]
    error = caught(lambda: gate.wait.remote(), exceptions.PendingCallsLimitError)
    assert "max_pending_calls" in str(error)
    opened.touch()
    get(refs)
    get(gate.wait.remote())


def test_an_exception_of_a_method_arrives_as_its_type_and_the_actor_goes_on() -> None:
    class Odd(ValueError):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    @stoker.remote
    class Raises:
        def fail(self) -> None:
            raise Odd(7)

        def ping(self) -> str:
            return "here"

    raises = Raises.remote()
    error = caught(lambda: get(raises.fail.remote()), ValueError)
    assert isinstance(error, exceptions.TaskError)
    assert error.code == 7 or getattr(error.cause, "code", None) == 7
    assert "in fail" in str(error)
    assert get(raises.ping.remote()) == "here"


def test_actors_start_tasks_and_actors_of_their_own() -> None:
    @stoker.remote
    def square(number: int) -> int:
        return number * number

    @stoker.remote(num_cpus=1)
    class Parent:
        def __init__(self, child: Any, work: Any) -> None:
            self.child = child.remote(100)
            self.work = work

        def squares(self, count: int) -> list[int]:
            values: list[int] = stoker.get([self.work.remote(i) for i in range(count)])
            return values

        def count(self) -> int:
            value: int = stoker.get(self.child.add.remote())
            return value

        def child_id(self) -> str:
            return str(self.child.actor_id)

        def drop(self) -> None:
            del self.child

    parent = Parent.remote(Counter, square)
    assert get(parent.squares.remote(20)) == [i * i for i in range(20)]
    assert get(parent.count.remote()) == 101
    child_id = get(parent.child_id.remote())
    get(parent.drop.remote())
    until_state(child_id, "DEAD")
