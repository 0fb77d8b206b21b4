"""Tasks end to end: arguments, results, nesting, retries, errors, bursts and threads."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError
from tests.e2e.conftest import WAIT_S, Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.usefixtures("cluster")


@stoker.remote
def add(a: int, b: int = 0) -> int:
    return a + b


@stoker.remote
def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@dataclasses.dataclass
class Parcel:
    name: str
    ref: Any


# -- arguments and results ---------------------------------------------------------------------------


def test_positional_and_keyword_arguments_arrive_in_their_places() -> None:
    args, kwargs = get(echo.remote(1, "two", [3], key={"four": 4}, other=None))
    assert args == (1, "two", [3])
    assert kwargs == {"key": {"four": 4}, "other": None}


def test_top_level_refs_arrive_as_values_and_nested_refs_as_refs() -> None:
    @stoker.remote
    def look(
        value: int, parcel: Parcel, items: list[Any], *, named: int, table: dict[str, Any]
    ) -> Any:
        refs = [parcel.ref, items[0], table["in"]["deep"]]
        assert all(isinstance(r, stoker.ObjectRef) for r in refs), refs
        return value, named, stoker.get(refs)

    one, two = add.remote(1), stoker.put(2)
    found = get(
        look.remote(one, Parcel("p", two), [one, 7], named=two, table={"in": {"deep": two}})
    )
    assert found == (1, 2, [2, 1, 2])


def test_a_ref_given_twice_arrives_twice() -> None:
    ref = stoker.put([1])
    args, kwargs = get(echo.remote(ref, ref, again=ref))
    assert args == ([1], [1])
    assert kwargs == {"again": [1]}


def test_a_chain_of_tasks_passes_values_on() -> None:
    ref = add.remote(0)
    for _ in range(50):
        ref = add.remote(ref, 1)
    assert get(ref) == 50


def test_a_failed_argument_fails_its_dependants_with_the_first_cause() -> None:
    @stoker.remote
    def fail() -> int:
        raise LookupError("the first cause")

    ref = add.remote(add.remote(fail.remote(), 1), 1)
    with pytest.raises(LookupError, match="the first cause"):
        get(ref)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_num_returns_gives_so_many_refs(count: int) -> None:
    refs = echo_range.options(num_returns=count).remote(count)
    if count == 0:
        assert refs is None
    elif count == 1:
        assert get(refs) == [0]
    else:
        assert get(refs) == list(range(count))


@stoker.remote
def echo_range(count: int) -> list[int]:
    return list(range(count))


@pytest.mark.parametrize(
    ("value", "said"),
    [([1, 2, 3], "3 values"), ([1], "1 values"), (7, "int"), (None, "NoneType"), ("ab", "str")],
)
def test_a_wrong_number_of_results_says_what_came_instead(value: Any, said: str) -> None:
    @stoker.remote(num_returns=2)
    def wrong() -> Any:
        return value

    refs = wrong.remote()
    for ref in refs:  # each of them tells
        with pytest.raises(BadRequestError, match=rf"num_returns=2 but returned {said}"):
            get(ref)


def test_options_make_a_new_function_and_leave_the_old_one_alone() -> None:
    other = add.options(name="other", num_cpus=0.5)
    assert (other.name, add.name) == ("other", "add")
    assert get([other.remote(1, 1), add.remote(1, 2)]) == [2, 3]


def test_a_task_knows_its_name_and_attempt() -> None:
    @stoker.remote(name="observed")
    def observe() -> tuple[str, int, str]:
        context = stoker.get_runtime_context()
        return context.task_name, context.attempt, context.task_id

    ref = observe.remote()
    name, attempt, task_id = get(ref)
    assert (name, attempt, task_id) == ("observed", 0, ref.task_id)


def test_recursive_functions_find_themselves() -> None:
    @stoker.remote
    def factorial(n: int) -> int:
        return 1 if n <= 1 else n * stoker.get(factorial.remote(n - 1))

    assert get(factorial.remote(5)) == 120


def test_async_functions_run_as_tasks_and_await_refs() -> None:
    @stoker.remote
    async def gather(refs: list[Any]) -> list[int]:
        return list(await asyncio.gather(*refs))

    assert get(gather.remote([add.remote(i) for i in range(4)])) == [0, 1, 2, 3]


def test_the_same_call_with_cache_runs_once(flags: Flags) -> None:
    @stoker.remote(cache=True)
    def slow(x: int) -> int:
        flags.note("ran", x)
        return x

    assert get([slow.remote(1), slow.remote(1), slow.remote(2), slow.remote(1)]) == [1, 1, 2, 1]
    assert get(slow.remote(1)) == 1
    assert sorted(flags.notes("ran")) == ["1", "2"]


def test_a_failed_call_is_not_cached(flags: Flags) -> None:
    @stoker.remote(cache=True)
    def flaky() -> int:
        flags.note("ran")
        if len(flags.notes("ran")) == 1:
            raise ValueError("only once")
        return 7

    with pytest.raises(ValueError, match="only once"):
        get(flaky.remote())
    assert get(flaky.remote()) == 7


# -- nesting -----------------------------------------------------------------------------------------


def test_tasks_nest_on_one_cpu_because_a_waiting_parent_gives_its_cpu_back(
    driver: Callable[..., Any],
) -> None:
    done = driver(
        """
        import asyncio, threading
        import stoker

        stoker.init(num_cpus=1, num_gpus=0)

        @stoker.remote
        def down(n):
            return 0 if n == 0 else 1 + stoker.get(down.remote(n - 1))

        @stoker.remote
        async def down_async(n):
            return 0 if n == 0 else 1 + await down_async.remote(n - 1)

        @stoker.remote
        def down_wait(n):
            if n == 0:
                return 0
            (ready,), _ = stoker.wait([down_wait.remote(n - 1)])
            return 1 + stoker.get(ready)

        @stoker.remote
        def numbers(n):
            yield from range(n)

        @stoker.remote
        def sums(n):
            return sum(stoker.get(r) for r in numbers.remote(n))

        @stoker.remote
        def down_future(n):
            return 0 if n == 0 else 1 + down_future.remote(n - 1).future().result()

        @stoker.remote
        def in_thread(n):
            if n == 0:
                return 0
            found = []
            thread = threading.Thread(target=lambda: found.append(stoker.get(in_thread.remote(n - 1))))
            thread.start()
            thread.join()
            return 1 + found[0]

        for function in (down, down_async, down_wait, down_future, in_thread):
            got = stoker.get([function.remote(3) for _ in range(3)], timeout=40)
            print(function.name, got)
        print("sums", stoker.get(sums.remote(5), timeout=40))
        """
    )
    assert done.returncode == 0, done.stderr
    for name in ("down", "down_async", "down_wait", "down_future", "in_thread"):
        assert f"{name} [3, 3, 3]" in done.stdout
    assert "sums 10" in done.stdout


def test_many_parents_with_many_children_finish() -> None:
    @stoker.remote
    def parent(n: int) -> int:
        return sum(stoker.get([add.remote(i, n) for i in range(10)]))

    assert get([parent.remote(n) for n in range(12)]) == [45 + 10 * n for n in range(12)]


def test_a_task_submitted_by_a_task_submitted_by_an_actor() -> None:
    @stoker.remote
    def outer(x: int) -> int:
        return stoker.get(add.remote(x, 1)) + 1

    @stoker.remote
    class Caller:
        def call(self, x: int) -> int:
            return stoker.get(outer.remote(x)) + 1

        def ref(self, x: int) -> list[Any]:
            return [outer.remote(x)]

    caller = Caller.remote()
    assert get(caller.call.remote(1)) == 4
    assert get(get(caller.ref.remote(1))) == [3]
    stoker.kill(caller)


# -- many ----------------------------------------------------------------------------------------------


def test_four_threads_submit_two_thousand_tasks_at_once() -> None:
    def submit(base: int) -> int:
        return sum(get([add.remote(base, i) for i in range(500)]))

    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(submit, range(4)))
    assert sums == [sum(range(500)) + 500 * base for base in range(4)]


def test_a_burst_of_twenty_thousand_tasks() -> None:
    assert get([add.remote(i) for i in range(20_000)], timeout=100) == list(range(20_000))


def test_many_threads_get_the_same_ref(flags: Flags) -> None:
    @stoker.remote
    def late() -> int:
        flags.wait("go")
        return 5

    ref = late.remote()
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(get, ref) for _ in range(16)]
        flags.raise_("go")
        assert [f.result(WAIT_S) for f in futures] == [5] * 16


# -- where the code comes from ---------------------------------------------------------------------


def test_modules_beside_the_drivers_script_can_be_imported_by_tasks(
    driver: Callable[..., Any], tmp_path: Any
) -> None:
    (tmp_path / "beside_it.py").write_text(
        "class Thing:\n    size = 3\ndef double(x): return 2 * x\n"
    )
    done = driver(
        """
        import stoker
        from beside_it import Thing, double

        class Mine:
            def __init__(self): self.x = 1

        @stoker.remote
        def use(thing):
            import beside_it
            return double(thing.size), Mine(), beside_it.Thing()

        stoker.init(num_cpus=1, num_gpus=0)
        number, mine, thing = stoker.get(use.remote(Thing()), timeout=40)
        assert isinstance(mine, Mine) and isinstance(thing, Thing)
        print("number", number, stoker.get(stoker.remote(double).remote(4), timeout=40))
        """
    )
    assert done.returncode == 0, done.stderr
    assert "number 6 8" in done.stdout


def test_runtime_env_sets_variables_and_the_working_directory(tmp_path: Any) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "shipped_module.py").write_text("ANSWER = 42\n")
    (folder / "data.txt").write_text("some data")

    @stoker.remote(runtime_env={"env_vars": {"COLOUR": "green"}, "working_dir": str(folder)})
    def look() -> tuple[Any, ...]:
        import shipped_module  # type: ignore[import-not-found]

        with open("data.txt") as file:
            return os.environ["COLOUR"], shipped_module.ANSWER, file.read()

    @stoker.remote
    def plain() -> str | None:
        return os.environ.get("COLOUR")

    assert get(look.remote()) == ("green", 42, "some data")
    assert get(plain.remote()) is None


def test_output_comes_to_the_driver_with_the_name_in_front(driver: Callable[..., Any]) -> None:
    done = driver(
        """
        import sys
        import stoker

        stoker.init(num_cpus=1, num_gpus=0)

        @stoker.remote
        def talk():
            print("to stdout")
            print("to stderr", file=sys.stderr)

        stoker.get(talk.remote(), timeout=40)
        """
    )
    assert done.returncode == 0, done.stderr
    for text, printed in (("to stdout", done.stdout), ("to stderr", done.stderr)):
        lines = [line for line in printed.splitlines() if line.startswith("(talk pid=")]
        assert [line.partition(") ")[2] for line in lines] == [text], printed


def test_the_cluster_is_idle_after_all_that(cluster: Cluster) -> None:
    until(cluster.is_idle, 40, "all leases went back")
