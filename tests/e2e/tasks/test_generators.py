"""Streaming generators end to end: order, errors, backpressure, giving up, and refs inside items."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, TaskCancelledError, WorkerDiedError
from stoker.runtime.tasks.streams import AHEAD
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("cluster")

LARGE = 300_000


@stoker.remote
def count(n: int) -> Any:
    yield from range(n)


def test_items_come_in_order_and_end() -> None:
    stream = count.remote(1000)
    assert [get(ref) for ref in stream] == list(range(1000))
    assert list(stream) == [], "an ended stream stays ended"
    assert get(stream.completed()) is None
    assert list(count.remote(0)) == []


def test_items_come_before_the_task_ends(flags: Flags) -> None:
    @stoker.remote
    def step() -> Any:
        yield 1
        flags.wait("more")
        yield 2

    stream = step.remote()
    assert get(next(stream)) == 1
    assert stoker.wait([stream.completed()], timeout=0)[0] == []
    flags.raise_("more")
    assert get(next(stream)) == 2
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_in_the_middle_comes_after_the_items_before_it() -> None:
    @stoker.remote(max_retries=0)
    def breaks() -> Any:
        yield 1
        yield 2
        raise LookupError("in the middle")

    stream = breaks.remote()
    one, two, bad = stream
    assert get([one, two]) == [1, 2]
    with pytest.raises(LookupError, match="in the middle"):
        get(bad)
    with pytest.raises(LookupError, match="in the middle"):
        get(stream.completed())


def test_an_item_that_does_not_pickle_is_an_error_in_its_place() -> None:
    @stoker.remote(max_retries=0)
    def bad() -> Any:
        import threading

        yield 1
        yield [threading.Lock()]

    one, two = bad.remote()
    assert get(one) == 1
    with pytest.raises(stoker.exceptions.SerializationError, match=r"result of .*bad\[0\]"):
        get(two)


def test_a_worker_that_dies_in_the_middle_is_an_error(flags: Flags) -> None:
    @stoker.remote(max_retries=0)
    def dies() -> Any:
        import os

        yield 1
        flags.wait("seen")
        os._exit(1)

    stream = dies.remote()
    assert get(next(stream)) == 1
    flags.raise_("seen")
    with pytest.raises(WorkerDiedError):
        get(next(stream))


def test_a_generator_tried_again_late_goes_on() -> None:
    @stoker.remote(max_retries=1)
    def fail_late(n: int) -> Any:
        for i in range(n):
            if i == n - 10 and stoker.get_runtime_context().attempt == 0:
                raise ConnectionError("once")
            yield i

    stream = fail_late.options(retry_exceptions=True).remote(3 * AHEAD)
    assert [get(ref) for ref in stream] == list(range(3 * AHEAD))


def test_a_retried_generator_gives_each_item_once(flags: Flags) -> None:
    @stoker.remote(max_retries=1)
    def twice() -> Any:
        import os

        yield 0
        yield 1
        if stoker.get_runtime_context().attempt == 0:
            flags.wait("seen")
            os._exit(1)
        yield 2

    stream = twice.remote()
    first = [get(next(stream)), get(next(stream))]
    flags.raise_("seen")
    assert [*first, *(get(r) for r in stream)] == [0, 1, 2]


def test_a_generator_does_not_run_far_ahead_of_its_reader(flags: Flags) -> None:
    @stoker.remote
    def fast() -> Any:
        for i in range(10 * AHEAD):
            flags.folder.joinpath("made").write_text(str(i))
            yield i

    def made() -> int:
        text = flags.folder.joinpath("made").read_text() if flags.is_up("made") else ""
        return int(text or 0)

    stream = fast.remote()
    until(lambda: made() >= AHEAD, 40, "it runs ahead")
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert made() <= AHEAD + 1
    assert [get(r) for r in stream] == list(range(10 * AHEAD))


def test_a_dropped_generator_stops_its_task(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote
    def endless() -> Any:
        try:
            while True:
                yield np.zeros(LARGE, np.uint8)
        finally:
            flags.raise_("stopped")

    stream = endless.remote()
    assert get(next(stream)).nbytes == LARGE
    del stream
    gc.collect()
    flags.wait("stopped")
    until(lambda: not cluster.stored(), 40, "what it made is freed")
    until(cluster.is_idle, 40, "its lease went back")


def test_large_items_lie_in_shared_memory_and_go(cluster: Cluster) -> None:
    @stoker.remote
    def arrays() -> Any:
        for i in range(5):
            yield np.full(LARGE, i, np.uint8)

    assert [int(get(r)[0]) for r in arrays.remote()] == [0, 1, 2, 3, 4]
    gc.collect()
    until(lambda: not cluster.stored(), 40, "all are freed")


def test_refs_inside_items() -> None:
    @stoker.remote
    def boxes() -> Any:
        for i in range(3):
            yield {"ref": stoker.put(i)}

    assert [get(get(r)["ref"]) for r in boxes.remote()] == [0, 1, 2]


def test_async_for_over_a_stream() -> None:
    async def main() -> list[int]:
        return [await ref async for ref in count.remote(300)]

    assert asyncio.run(main()) == list(range(300))


def test_generators_of_actors_sync_and_async() -> None:
    @stoker.remote
    class Plain:
        def count(self, n: int) -> Any:
            yield from range(n)

    @stoker.remote
    class Async:
        async def count(self, n: int) -> Any:
            for i in range(n):
                await asyncio.sleep(0)
                yield i

    for kind in (Plain, Async):
        actor = kind.remote()
        stream = actor.count.options(num_returns="streaming").remote(600)
        assert [get(r) for r in stream] == list(range(600))
        stoker.kill(actor)


def test_an_async_generator_function_streams() -> None:
    @stoker.remote
    async def numbers(n: int) -> Any:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    assert [get(r) for r in numbers.remote(5)] == [0, 1, 2, 3, 4]


def test_a_stream_feeds_other_tasks() -> None:
    @stoker.remote
    def double(x: int) -> int:
        return 2 * x

    assert get([double.remote(r) for r in count.remote(5)]) == [0, 2, 4, 6, 8]


def test_a_generator_with_a_number_of_returns_gives_refs() -> None:
    assert get(count.options(num_returns=3).remote(3)) == [0, 1, 2]
    with pytest.raises(BadRequestError, match="num_returns=2"):
        get(count.options(num_returns=2).remote(3))


@pytest.mark.parametrize("large", [False, True])
def test_of_a_number_of_returns_those_yielded_before_an_error_are_values(large: bool) -> None:
    @stoker.remote(num_returns=3, max_retries=0)
    def breaks() -> Any:
        yield np.zeros(LARGE) if large else 1
        yield 2
        raise ValueError("the third")

    @stoker.remote(num_returns=2, max_retries=0)
    def breaks_late() -> Any:
        yield 1
        yield 2
        raise ValueError("too late")

    first, second, third = breaks.remote()
    with pytest.raises(ValueError, match="the third"):
        get(third)
    assert (np.size(get(first)), get(second)) == (LARGE if large else 1, 2)
    for ref in breaks_late.remote():  # an error that none of the values stands for hides none
        with pytest.raises(ValueError, match="too late"):
            get(ref)


def test_items_of_a_dead_worker_and_of_a_dead_actor_stay(flags: Flags) -> None:
    @stoker.remote(max_retries=0)
    def dies() -> Any:
        yield np.zeros(LARGE)
        yield 2
        flags.wait("task dies")
        os._exit(3)

    @stoker.remote
    class Source:
        def dies(self) -> Any:
            yield np.zeros(LARGE)
            yield 2
            flags.wait("actor dies")
            os._exit(3)

    source = Source.remote()
    for stream, flag in ((dies.remote(), "task dies"), (source.dies.remote(), "actor dies")):
        refs = [next(stream), next(stream)]
        flags.raise_(flag)
        (error,) = stream
        with pytest.raises(ConnectionError):
            get(error)
        assert np.size(get(refs[0])) == LARGE and get(refs[1]) == 2


def test_streaming_of_what_is_no_generator_is_an_error() -> None:
    @stoker.remote(num_returns="streaming")
    def wrong() -> int:
        return 5

    (bad,) = wrong.remote()
    with pytest.raises(BadRequestError, match="not a generator"):
        get(bad)


def test_get_of_a_generator_says_what_to_do() -> None:
    with pytest.raises(BadRequestError, match="iterate"):
        stoker.get(count.remote(1))  # type: ignore[call-overload]


def test_a_generator_cannot_be_an_argument() -> None:
    with pytest.raises(stoker.exceptions.SerializationError, match="pass its refs"):
        count.remote(count.remote(1))  # type: ignore[arg-type]


def test_cancel_of_a_stream(flags: Flags) -> None:
    @stoker.remote
    def endless() -> Any:
        i = 0
        while True:
            yield i
            i += 1

    stream = endless.remote()
    assert get(next(stream)) == 0
    stoker.cancel(stream)
    with pytest.raises(TaskCancelledError):
        get(stream.completed())
    with pytest.raises(TaskCancelledError):
        for ref in stream:
            get(ref)
