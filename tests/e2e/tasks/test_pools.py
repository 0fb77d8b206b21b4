"""``stoker.Executor``, ``util.Pool`` and ``map_stream`` on a real cluster of this machine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import multiprocessing
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, GetTimeoutError
from stoker.util import Pool
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e._flags import Flags

WAIT_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_LEASE_IDLE_S", "0.1")
        stoker.init(num_cpus=4, log_to_driver=False)
        yield
        stoker.shutdown()


def odd_only() -> Any:
    # Made here, because workers cannot import a test's module: a function of a function travels whole.
    def check(x: int) -> int:
        if x % 2 == 0:
            raise ValueError(f"{x} is even")
        return x

    return check


def gate() -> Any:
    def wait(path: str) -> int:
        import pathlib
        import time

        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        return 1

    return wait


class TestExecutor:
    def test_a_call_returns_its_result_or_raises_its_own_error(self) -> None:
        with stoker.Executor() as executor:
            assert executor.submit(pow, 2, exp=5).result(WAIT_S) == 32
            assert executor.submit(lambda x: x + 1, 1).result(WAIT_S) == 2
            assert executor.submit(stoker.put, 1) is not None
            assert executor.submit(math.sqrt, stoker.put(16.0)).result(WAIT_S) == 4  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="2 is even"):
                executor.submit(odd_only(), 2).result(WAIT_S)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(pow, 2, 2)

    def test_futures_are_those_of_the_standard_library(self) -> None:
        called: list[int] = []
        with stoker.Executor() as executor:
            futures = [executor.submit(math.factorial, n) for n in range(20)]
            futures[3].add_done_callback(lambda future: called.append(future.result()))
            done, rest = concurrent.futures.wait(futures, WAIT_S)
            assert (len(done), len(rest)) == (20, 0)
            found = [f.result() for f in concurrent.futures.as_completed(futures, WAIT_S)]
        assert sorted(found) == sorted(math.factorial(n) for n in range(20))
        assert called == [6]

    def test_a_call_that_waits_can_be_cancelled_and_one_that_runs_cannot(
        self, tmp_path: Path
    ) -> None:
        wait, path = gate(), tmp_path / "open"
        with stoker.Executor(max_workers=1) as executor:
            first = executor.submit(wait, str(path))
            until(first.running, WAIT_S, "the first call runs")
            second, third = executor.submit(wait, str(path)), executor.submit(pow, 2, 2)
            assert not first.cancel()
            assert second.cancel() and second.cancelled() and second.done()
            assert second in concurrent.futures.wait([second], WAIT_S).done
            with pytest.raises(concurrent.futures.CancelledError):
                second.result(WAIT_S)
            path.touch()
            assert (first.result(WAIT_S), third.result(WAIT_S)) == (1, 4)
            assert not first.cancel() and not first.running()

    def test_shutdown_can_cancel_what_waits(self, tmp_path: Path) -> None:
        wait, path = gate(), tmp_path / "open"
        executor = stoker.Executor(max_workers=1)
        first = executor.submit(wait, str(path))
        until(first.running, WAIT_S, "the first call runs")
        others = [executor.submit(wait, str(path)) for _ in range(5)]
        executor.shutdown(wait=False, cancel_futures=True)
        assert all(other.cancelled() for other in others)
        path.touch()
        assert first.result(WAIT_S) == 1

    def test_map_keeps_the_order_and_raises_at_the_item(self) -> None:
        with stoker.Executor() as executor:
            assert list(executor.map(pow, range(50), [2] * 50)) == [x * x for x in range(50)]
            assert list(executor.map(math.sqrt, range(1000), chunksize=7)) == [
                math.sqrt(x) for x in range(1000)
            ]
            results = executor.map(odd_only(), [1, 3, 4, 5])
            assert [next(results), next(results)] == [1, 3]
            with pytest.raises(ValueError, match="4 is even") as caught:
                next(results)
            assert caught.value.item_index == 2  # type: ignore[attr-defined]

    def test_map_calls_all_though_nobody_takes_the_results(self, tmp_path: Path) -> None:
        with stoker.Executor() as executor:
            executor.map(os.mkdir, [str(tmp_path / str(n)) for n in range(50)])
        assert len(list(tmp_path.iterdir())) == 50

    def test_map_with_a_window_takes_items_as_results_are_taken(self) -> None:
        taken: list[int] = []

        def items() -> Iterator[int]:
            for n in range(10_000):
                taken.append(n)
                yield n

        with stoker.Executor() as executor:
            results = executor.map(math.sqrt, items(), window=50)
            assert [next(results) for _ in range(10)] == [math.sqrt(n) for n in range(10)]
            assert len(taken) <= 60
            results.close()  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="buffer"):
            executor.map(abs, [1], buffer=1)

    def test_map_has_a_deadline(self, tmp_path: Path) -> None:
        with stoker.Executor() as executor:
            results = executor.map(gate(), [str(tmp_path / "never")], timeout=0.2)
            with pytest.raises(TimeoutError):
                next(results)

    async def test_an_event_loop_uses_it(self) -> None:
        with stoker.Executor() as executor:
            loop = asyncio.get_running_loop()
            calls = [loop.run_in_executor(executor, math.factorial, n) for n in range(5)]
            assert await asyncio.gather(*calls) == [1, 1, 2, 6, 24]

    def test_it_works_inside_a_task(self) -> None:
        @stoker.remote
        def outer() -> int:
            import math

            import stoker

            with stoker.Executor() as executor:
                return sum(executor.map(math.factorial, range(5)))

        assert stoker.get(outer.remote(), timeout=WAIT_S) == 34


class TestPool:
    def test_its_methods_are_those_of_multiprocessing(self) -> None:
        with Pool(2) as pool:
            assert pool.apply(pow, (2, 3)) == 8
            assert pool.apply(pow, (2,), {"exp": 4}) == 16
            assert pool.map(math.sqrt, range(100)) == [math.sqrt(n) for n in range(100)]
            assert pool.map(abs, []) == []
            assert pool.starmap(pow, [(2, 3), (3, 2)], chunksize=1) == [8, 9]
            assert list(pool.imap(abs, (-n for n in range(300)), chunksize=9)) == list(range(300))
            assert sorted(pool.imap_unordered(abs, range(300))) == list(range(300))
            result = pool.map_async(math.factorial, range(5))
            assert result.get(WAIT_S) == [1, 1, 2, 6, 24]
            assert result.ready() and result.successful()
            assert pool.starmap_async(pow, [(2, 2)]).get(WAIT_S) == [4]

    def test_callbacks_and_errors(self) -> None:
        said: list[Any] = []
        pool = Pool(2)
        pool.apply_async(pow, (2, 2), callback=said.append)
        failed = pool.apply_async(odd_only(), (2,), error_callback=said.append)
        pool.map_async(abs, [-1, 2], callback=said.append)
        pool.close()
        pool.join()
        assert 4 in said and [1, 2] in said and len(said) == 3
        assert any(isinstance(one, ValueError) for one in said)
        assert not failed.successful()
        with pytest.raises(ValueError, match="2 is even"):
            failed.get()
        with pytest.raises(ValueError, match="the pool was closed"):
            pool.map(abs, [1])

    def test_the_first_error_of_a_map_comes_out_and_those_of_imap_one_by_one(self) -> None:
        with Pool(2) as pool:
            with pytest.raises(ValueError, match="4 is even"):
                pool.map(odd_only(), [1, 3, 4, 6], chunksize=1)
            results = pool.imap(odd_only(), [1, 2, 3, 4])
            found: list[Any] = []
            for _ in range(4):
                try:
                    found.append(next(results))
                except ValueError as error:
                    found.append(str(error.cause))  # type: ignore[attr-defined]
            assert found == [1, "2 is even", 3, "4 is even"]
            with pytest.raises(StopIteration):
                next(results)

    def test_timeouts_are_those_of_multiprocessing(self, tmp_path: Path) -> None:
        path = tmp_path / "open"
        with Pool(1) as pool:
            result = pool.apply_async(gate(), (str(path),))
            with pytest.raises(multiprocessing.TimeoutError):
                result.get(0.1)
            with pytest.raises(ValueError, match="not ready"):
                result.successful()
            with pytest.raises(ValueError, match="still running"):
                pool.join()
            rest = pool.imap(gate(), [str(path)])
            with pytest.raises(multiprocessing.TimeoutError):
                rest.next(0.1)
            path.touch()
            assert (result.get(WAIT_S), rest.next(WAIT_S)) == (1, 1)

    def test_no_more_processes_run_than_there_shall_be(self, tmp_path: Path) -> None:
        def count(folder: str) -> int:
            import os
            import pathlib
            import time

            mark = pathlib.Path(folder, str(os.getpid()))
            mark.touch()
            time.sleep(0.1)
            running = len(list(pathlib.Path(folder).iterdir()))
            mark.unlink()
            return running

        with Pool(2) as pool:
            assert max(pool.map(count, [str(tmp_path)] * 8, chunksize=1)) <= 2

    def test_more_processes_than_cpus_run_at_once(self, tmp_path: Path) -> None:
        def meet(folder: str) -> None:
            import os
            import pathlib

            from tests.services import until

            pathlib.Path(folder, str(os.getpid())).touch()
            until(lambda: len(os.listdir(folder)) > 4, 40.0, "five run at once")

        with Pool(8) as pool:  # the cluster has four CPUs
            pool.map(meet, [str(tmp_path)] * 16, chunksize=1)

    def test_an_initializer_runs_once_in_each_process(self) -> None:
        def begin(value: int) -> None:
            global state
            state = [*globals().get("state", []), value]

        def read(_: int) -> Any:
            return tuple(state)  # type: ignore[name-defined]

        with Pool(2, begin, (7,)) as pool:
            assert set(pool.map(read, range(20), chunksize=1)) == {(7,)}

    def test_a_process_ends_after_so_many_chunks(self) -> None:
        with Pool(1, maxtasksperchild=2) as pool:
            pids = pool.map(_pid(), range(6), chunksize=1)
        assert len(set(pids)) >= 3

    def test_terminate_stops_what_runs(self, tmp_path: Path) -> None:
        pool = Pool(1)
        result = pool.map_async(gate(), [str(tmp_path / "never")] * 3)
        pool.terminate()
        pool.join()
        assert result.ready() and not result.successful()

    def test_join_makes_the_calls_whose_results_nobody_took(self, tmp_path: Path) -> None:
        pool = Pool(2)
        paths = [str(tmp_path / str(n)) for n in range(1500)]
        results = pool.imap_unordered(os.mkdir, paths, chunksize=10)
        pool.close()
        pool.join()
        assert len(list(tmp_path.iterdir())) == 1500
        assert len(list(results)) == 1500

    def test_long_calls_behind_short_ones_go_to_others(self) -> None:
        def nap(seconds: float) -> int:
            import os
            import time

            time.sleep(seconds)
            return os.getpid()

        with Pool(4) as pool:
            pool.map(nap, [0.1] * 4, chunksize=1)  # the workers are there
            pids = pool.map(nap, [0.0] * 3000 + [0.3] * 12, chunksize=1)
        assert len(set(pids[-12:])) > 1


def _pid() -> Any:
    def pid(_: int) -> int:
        import os

        return os.getpid()

    return pid


class TestMapStream:
    @pytest.mark.parametrize("ordered", [True, False])
    def test_no_more_than_the_window_is_under_way(self, ordered: bool) -> None:
        taken = 0

        def items() -> Iterator[int]:
            nonlocal taken
            for n in range(5000):
                taken += 1
                yield n

        found = []
        for number, value in enumerate(
            stoker.map_stream(math.sqrt, items(), window=64, ordered=ordered)
        ):
            found.append(value)
            assert taken <= number + 1 + 64
        assert sorted(found) == [math.sqrt(n) for n in range(5000)]
        assert not ordered or found == sorted(found)

    def test_an_error_has_the_index_of_its_item_and_ends_the_stream(self) -> None:
        for chunksize in (1, 4):
            numbers = [*range(1, 401, 2), 8, *range(1, 99, 2)]
            stream = stoker.map_stream(odd_only(), numbers, chunksize=chunksize)
            assert [next(stream) for _ in range(200)] == numbers[:200]
            with pytest.raises(ValueError, match="8 is even") as caught:
                next(stream)
            assert caught.value.item_index == 200  # type: ignore[attr-defined]
            assert "item 200" in caught.value.__notes__[0]
            assert list(stream) == []

    def test_what_is_there_first_comes_first(self, tmp_path: Path) -> None:
        def wait(path: str) -> str:
            import pathlib
            import time

            while path and not pathlib.Path(path).exists():
                time.sleep(0.01)
            return path

        path = tmp_path / "open"
        with stoker.map_stream(wait, [str(path), "", ""], ordered=False) as stream:
            assert [stream.next(WAIT_S), stream.next(WAIT_S)] == ["", ""]
            with pytest.raises(GetTimeoutError):
                stream.next(0.1)
            path.touch()
            assert list(stream) == [str(path)]

    def test_its_end_cancels_what_is_under_way(self, flags: Flags) -> None:
        with stoker.map_stream(gate(), [str(flags.folder / "never")] * 100, window=10) as stream:
            time.sleep(0.2)
        assert list(stream) == []
        until(
            lambda: stoker.available_resources() == stoker.cluster_resources(),
            WAIT_S,
            "all leases are back",
        )

    def test_remote_functions_options_refs_and_faulty_iterables(self) -> None:
        half = stoker.remote(num_cpus=0.5)(lambda x: x / 2)
        refs = [stoker.put(n) for n in range(9)]
        assert list(stoker.map_stream(half, refs)) == [n / 2 for n in range(9)]
        assert list(stoker.map_stream(abs, refs, chunksize=4)) == list(range(9))  # type: ignore[arg-type]

        def items() -> Iterator[int]:
            yield -1
            raise KeyError("no more")

        stream = stoker.map_stream(abs, items())
        assert next(stream) == 1
        with pytest.raises(KeyError, match="no more"):
            next(stream)
        for wrong in ({"window": 0}, {"chunksize": 0}, {"num_cpu": 1}):
            with pytest.raises(BadRequestError):
                stoker.map_stream(abs, [1], **wrong)  # type: ignore[arg-type]

    def test_threads_may_have_streams_of_their_own(self) -> None:
        found: list[int] = []

        def run() -> None:
            found.append(sum(stoker.map_stream(abs, range(-500, 0), ordered=False)))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [sum(range(501))] * 3


NAMES = ("pool", "executor", "mapped", "stream")
INTERRUPTED = """
import sys, threading, time, signal, os
import stoker
from stoker.util import Pool

def nap(x):
    time.sleep(30)

stoker.init(num_cpus=2, log_to_driver=False)

def interrupt():
    while stoker.available_resources()["CPU"]:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

def pool():
    with Pool(2) as pool:
        pool.map(nap, range(8), chunksize=1)

def executor():
    with stoker.Executor(2) as executor:
        [executor.submit(nap, x) for x in range(8)][0].result()

def mapped():
    with stoker.Executor(2) as executor:
        list(executor.map(nap, range(8)))

def stream():
    list(stoker.map_stream(nap, range(8)))

for run in (pool, executor, mapped, stream):
    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    try:
        run()
    except KeyboardInterrupt:
        while stoker.available_resources()["CPU"] < 2:
            time.sleep(0.05)
        print(run.__name__, "ended" if time.monotonic() - began < 25 else "late")
"""


def test_ctrl_c_cancels_what_is_waited_for(driver: Any) -> None:
    done = driver(INTERRUPTED)
    assert done.stdout.splitlines() == [f"{n} ended" for n in NAMES]


def test_a_bar_of_a_task_comes_to_the_driver(driver: Any) -> None:
    done = driver("""
        import stoker

        def work(n):
            for _ in stoker.tqdm(range(n), desc=f"task {n}"):
                pass

        stoker.init(num_cpus=2)
        stoker.get([stoker.remote(work).remote(n) for n in (3, 4)])
        """)
    assert done.returncode == 0, done.stderr
    for n in (3, 4):
        assert done.stderr.count(f"task {n}: 100%") == 1
    assert "stoker-bar" not in done.stdout + done.stderr


def test_memory_is_bounded_over_many_items(driver: Any) -> None:
    done = driver("""
        import resource
        import stoker

        def grow(x):
            return bytes(1000)

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        stoker.init(num_cpus=2, log_to_driver=False)
        items = iter(range(220_000))
        stream = stoker.map_stream(grow, items, window=2000)
        for _ in range(20_000):
            next(stream)
        before = peak()
        count = sum(1 for _ in stream)
        print(count, peak() - before < 30_000)
        """)
    assert done.stdout.split() == ["200000", "True"], done.stderr
