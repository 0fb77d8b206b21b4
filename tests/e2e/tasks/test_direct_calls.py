"""Calls that are waited for one at a time pass no loop thread: right, whoever else uses the runtime."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from tests.e2e._cluster import head, run_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60.0


@stoker.remote(num_cpus=0)
def double(x: int) -> int:
    return 2 * x


@stoker.remote(num_cpus=0)
def slow(x: int, for_s: float) -> int:
    time.sleep(for_s)
    return x


@stoker.remote(num_cpus=0)
def nested(x: int) -> int:
    return sum(stoker.get(double.remote(x)) for _ in range(3))


@stoker.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count


@stoker.remote(num_cpus=0)
class AsyncCounter:
    def __init__(self) -> None:
        self.count = 0

    async def add(self, n: int) -> int:
        self.count += n
        return self.count

    async def block(self, for_s: float) -> None:
        time.sleep(for_s)  # noqa: ASYNC251 (as users do)


@pytest.mark.usefixtures("cluster")
class TestDirectCalls:
    def test_all_ways_to_wait_at_once(self, seed: int) -> None:
        counters = [Counter.remote(), AsyncCounter.remote()]
        errors: list[str] = []
        added = [0, 0]
        lock = threading.Lock()

        def use(index: int) -> None:
            rng = random.Random(seed + index)
            for _ in range(60):
                x, way = rng.randrange(1000), rng.randrange(8)
                if way == 0:
                    got, expected = stoker.get(double.remote(x), timeout=WAIT_S), 2 * x
                elif way == 1:
                    ready, _ = stoker.wait([ref := double.remote(x)], timeout=WAIT_S)
                    got, expected = stoker.get(ref) if ready else None, 2 * x
                elif way == 2:
                    got, expected = double.remote(x).future().result(WAIT_S), 2 * x
                elif way == 3:
                    got, expected = asyncio.run(awaited(x)), 2 * x
                elif way == 4:
                    got = stoker.get(nested.remote(x), timeout=WAIT_S)
                    expected = 6 * x
                elif way == 5:
                    got = sum(stoker.get([double.remote(i) for i in range(5)], timeout=WAIT_S))
                    expected = 20
                else:
                    which = way - 6
                    with lock:
                        added[which] += 1
                        got = stoker.get(counters[which].add.remote(1), timeout=WAIT_S)
                        expected = added[which]
                if got != expected:
                    errors.append(f"way {way}: {got} is not {expected}")

        threads = [threading.Thread(target=use, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        use(3)
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive()
        assert not errors

    def test_a_fire_and_forget_call_is_not_left_lying(self) -> None:
        counter = Counter.remote()
        for expected in range(1, 21):
            counter.add.remote(1)
            assert stoker.get(counter.add.remote(0), timeout=WAIT_S) == expected

    def test_what_a_call_waits_for_may_come_while_nobody_reads(self) -> None:
        for turn in range(20):
            assert stoker.get(double.remote(turn)) == 2 * turn
            ref = slow.remote(turn, 0.002)
            dependent = double.remote(ref)
            time.sleep(0.001 * (turn % 10))
            ready, _ = stoker.wait([dependent], timeout=WAIT_S)
            assert ready
            assert stoker.get(dependent) == 2 * turn

    def test_a_short_timeout_leaves_the_call_alone(self) -> None:
        stoker.get(slow.remote(0, 0.0))
        ref = slow.remote(7, 0.3)
        with pytest.raises(stoker.exceptions.GetTimeoutError):
            stoker.get(ref, timeout=0.01)
        assert stoker.get(ref, timeout=WAIT_S) == 7

    def test_a_cancel_reaches_a_call_that_is_read_directly(self) -> None:
        for _ in range(5):
            stoker.get(double.remote(1))
            ref = slow.remote(0, 30.0)
            threading.Timer(0.05, stoker.cancel, [ref]).start()
            began_s = time.monotonic()
            with pytest.raises(stoker.exceptions.TaskCancelledError):
                stoker.get(ref, timeout=WAIT_S)
            assert time.monotonic() - began_s < 20

    def test_an_async_actor_that_blocks_its_loop_still_gets_its_calls(self) -> None:
        actor = AsyncCounter.remote()
        for _ in range(50):
            stoker.get(actor.add.remote(1))
        blocked = actor.block.remote(0.2)
        refs = [actor.add.remote(1) for _ in range(10)]
        assert stoker.get(refs, timeout=WAIT_S)[-1] == 60
        stoker.get(blocked)

    def test_a_destructor_may_wait(self) -> None:
        """But for one that runs on the loop thread itself, which is told so."""
        got: list[int | None] = []

        class Cycle:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                try:
                    got.append(stoker.get(double.remote(21), timeout=WAIT_S))
                except RuntimeError as error:
                    assert "cannot wait for a result" in str(error)
                    got.append(None)

        for _ in range(30):
            Cycle()
            for _ in range(10):
                stoker.get(double.remote(1))
                [[] for _ in range(100)]
        gc.collect()
        assert 42 in got
        assert set(got) <= {42, None}

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_handler_that_raises_tears_nothing(self, seed: int) -> None:
        """As programs do that bound a piece of code by ``signal.setitimer``.

        Python itself loses what a handler raises while a destructor runs.
        """
        rng = random.Random(seed)

        def on_alarm(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, on_alarm)
        late = 0
        try:
            for turn in range(200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.003))
                    for _ in range(100):
                        assert stoker.get(double.remote(turn)) == 2 * turn
                except TimeoutError:
                    late += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert late
        assert stoker.get([double.remote(i) for i in range(100)], timeout=WAIT_S) == [
            2 * i for i in range(100)
        ]


async def awaited(x: int) -> int:
    return await double.remote(x)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with head(tmp_path_factory.mktemp("direct"), num_cpus=2) as other:
        yield other


def test_every_interrupt_is_seen_and_none_breaks_the_next_call(other: Any) -> None:
    program = """
        import os, random, signal, threading, time, stoker

        stoker.init()

        @stoker.remote
        def double(x): return 2 * x

        stoker.get(double.remote(1))
        done, sent = threading.Event(), []

        def interrupt():
            while not done.wait(random.uniform(0.0005, 0.01)):
                sent.append(1)
                os.kill(os.getpid(), signal.SIGINT)

        seen = calls = 0
        thread = threading.Thread(target=interrupt)
        until = time.monotonic() + 5
        started = False
        while time.monotonic() < until:
            try:
                if not started:
                    started = True
                    thread.start()
                while time.monotonic() < until:
                    assert stoker.get(double.remote(calls)) == 2 * calls
                    calls += 1
            except KeyboardInterrupt:
                seen += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert stoker.get([double.remote(i) for i in range(500)]) == [2 * i for i in range(500)]
        print("interrupts", seen > 0, "calls", calls > 0)
    """
    done = run_driver(other, textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert "interrupts True calls True" in done.stdout
