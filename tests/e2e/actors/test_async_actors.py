"""Async and threaded actors: many calls at once, groups with limits of their own, streams, cancels."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import caught, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=2, num_gpus=0) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


@stoker.remote
class Crowd:
    """Counts how many calls are inside at once."""

    def __init__(self, parties: int = 1) -> None:
        self.barrier = asyncio.Barrier(parties)
        self.inside = 0
        self.most = 0
        self.order: list[int] = []
        self.event = asyncio.Event()
        self.cancelled = 0

    async def visit(self, number: int = 0, seconds: float = 0.05) -> int:
        self.order.append(number)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return number

    async def meet(self, number: int) -> int:
        """Wait until so many are inside."""
        self.order.append(number)
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with asyncio.timeout(GET_S):
            await self.barrier.wait()
        await asyncio.sleep(0.02)  # here more than may come in would be seen
        self.inside -= 1
        return number

    async def until_there(self, number: int, path: str) -> int:
        self.order.append(number)
        await asyncio.to_thread(until, lambda: os.path.exists(path), GET_S, f"{path} is made")
        return number

    async def wait(self) -> str:
        await self.event.wait()
        return "released"

    async def release(self) -> None:
        self.event.set()

    async def facts(self) -> tuple[int, list[int], int]:
        return self.most, self.order, self.cancelled

    def plain(self) -> str:
        return "plain"

    async def upto(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def read(self, ref: list[Any]) -> Any:
        return await ref[0]

    async def fail(self) -> None:
        raise LookupError("nothing here")

    async def context(self) -> str:
        await asyncio.sleep(0.01)
        return str(stoker.get_runtime_context().task_id)


def test_calls_of_an_async_actor_run_at_once_and_start_in_order() -> None:
    crowd = Crowd.remote(100)
    assert get([crowd.meet.remote(i) for i in range(100)]) == list(range(100))
    most, order, _ = get(crowd.facts.remote())
    assert most == 100
    assert order == list(range(100))


def test_one_call_can_release_another() -> None:
    crowd = Crowd.remote()
    waiting = [crowd.wait.remote() for _ in range(3)]
    get(crowd.release.remote())
    assert get(waiting) == ["released"] * 3


def test_max_concurrency_bounds_an_async_actor() -> None:
    crowd = Crowd.options(max_concurrency=3).remote(3)
    get([crowd.meet.remote(i) for i in range(12)])
    assert get(crowd.facts.remote())[0] == 3


def test_plain_methods_and_streams_of_an_async_actor() -> None:
    crowd = Crowd.remote()
    assert get(crowd.plain.remote()) == "plain"
    assert [get(ref) for ref in crowd.upto.remote(600)] == list(range(600))


async def test_streams_and_refs_can_be_awaited_in_the_driver() -> None:
    crowd = Crowd.remote()
    seen = [await ref async for ref in crowd.upto.remote(5)]
    assert seen == [0, 1, 2, 3, 4]
    assert await crowd.visit.remote(7) == 7
    assert await asyncio.gather(*(crowd.visit.remote(i) for i in range(20))) == list(range(20))


def test_an_async_actor_awaits_refs_of_others() -> None:
    @stoker.remote(num_cpus=0)
    def late() -> str:
        time.sleep(0.2)
        return "late"

    crowd = Crowd.remote()
    assert get(crowd.read.remote([late.remote()])) == "late"
    assert get(crowd.read.remote([stoker.put(b"x" * 400_000)])) == b"x" * 400_000


def test_a_cancelled_async_call_sees_it_and_the_others_go_on() -> None:
    crowd = Crowd.remote()
    long = crowd.visit.remote(1, 30)
    other = crowd.visit.remote(2, 0.3)
    get(crowd.plain.remote())
    stoker.cancel(long)
    assert isinstance(caught(lambda: get(long)), exceptions.TaskCancelledError)
    assert get(other) == 2
    assert get(crowd.facts.remote())[2] == 1


def test_a_call_that_waits_for_its_turn_can_be_cancelled(tmp_path: Path) -> None:
    crowd = Crowd.options(max_concurrency=1).remote()
    first = crowd.until_there.remote(1, str(tmp_path / "go"))
    second = crowd.visit.remote(2)
    third = crowd.visit.remote(3)
    stoker.cancel(second)
    assert isinstance(caught(lambda: get(second)), exceptions.TaskCancelledError)
    (tmp_path / "go").touch()
    assert get([first, third]) == [1, 3]
    assert get(crowd.facts.remote())[1] == [1, 3]


def test_errors_of_async_methods_arrive_and_the_actor_goes_on() -> None:
    crowd = Crowd.remote()
    error = caught(lambda: get(crowd.fail.remote()), LookupError)
    assert "nothing here" in str(error)
    assert "in fail" in str(error)
    assert get(crowd.plain.remote()) == "plain"


def test_each_async_call_knows_its_own_task() -> None:
    crowd = Crowd.remote()
    refs = [crowd.context.remote() for _ in range(10)]
    assert get(refs) == [ref.task_id for ref in refs]


def test_the_constructor_of_an_async_actor_may_fail() -> None:
    @stoker.remote
    class Broken:
        def __init__(self) -> None:
            raise OSError("no disk")

        async def ping(self) -> None:
            return None

    error = caught(lambda: get(Broken.remote().ping.remote()), exceptions.ActorDiedError)
    assert "no disk" in str(error)


@stoker.remote
class Threads:
    """Methods run on threads: a barrier shows that they do so together."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=GET_S)
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def meet(self) -> int:
        return self.barrier.wait()

    def visit(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.barrier.wait()
        time.sleep(0.02)  # here more than may come in would be seen
        with self.lock:
            self.inside -= 1

    def facts(self) -> int:
        return self.most

    def stubborn(self, path: str) -> str:
        until(lambda: os.path.exists(path), GET_S, f"{path} is made")
        return "done"

    def task_id(self) -> str:
        return str(stoker.get_runtime_context().task_id)


def test_a_threaded_actor_runs_as_many_calls_at_once_as_it_may() -> None:
    threads = Threads.options(max_concurrency=4).remote(4)
    assert sorted(get([threads.meet.remote() for _ in range(4)])) == [0, 1, 2, 3]
    get([threads.visit.remote() for _ in range(12)])
    assert get(threads.facts.remote()) == 4
    refs = [threads.task_id.remote() for _ in range(8)]
    assert get(refs) == [ref.task_id for ref in refs]


def test_a_waiting_call_of_a_threaded_actor_can_be_cancelled(tmp_path: Path) -> None:
    threads = Threads.options(max_concurrency=2).remote(2)
    busy = [threads.stubborn.remote(str(tmp_path / "go")) for _ in range(2)]
    waiting = threads.meet.remote()
    stoker.cancel(waiting)
    assert isinstance(caught(lambda: get(waiting)), exceptions.TaskCancelledError)
    (tmp_path / "go").touch()
    assert get(busy) == ["done", "done"]


def test_concurrency_groups_have_limits_of_their_own() -> None:
    @stoker.remote(concurrency_groups={"io": 2, "compute": 1})
    class Groups:
        def __init__(self) -> None:
            self.event = threading.Event()
            self.names: list[str] = []

        @stoker.method(concurrency_group="io")
        def wait(self) -> bool:
            return self.event.wait(GET_S)

        @stoker.method(concurrency_group="compute")
        def release(self) -> str:
            self.event.set()
            return threading.current_thread().name

        def default(self) -> str:
            return threading.current_thread().name

    groups = Groups.remote()
    waiting = [groups.wait.remote() for _ in range(2)]
    assert "compute" in get(groups.release.remote())
    assert get(waiting) == [True, True]
    assert "io" not in get(groups.default.remote())
    assert "io" in get(groups.default.options(concurrency_group="io").remote())


def test_async_concurrency_groups_have_limits_of_their_own() -> None:
    @stoker.remote(concurrency_groups={"io": 2})
    class Groups:
        def __init__(self) -> None:
            self.inside = 0
            self.most = 0
            self.two = asyncio.Barrier(2)

        @stoker.method(concurrency_group="io")
        async def visit(self) -> int:
            self.inside += 1
            self.most = max(self.most, self.inside)
            async with asyncio.timeout(GET_S):
                await self.two.wait()
            await asyncio.sleep(0.02)  # here more than may come in would be seen
            self.inside -= 1
            return self.most

        async def free(self) -> int:
            return self.most

    groups = Groups.remote()
    assert max(get([groups.visit.remote() for _ in range(8)])) == 2
    assert get(groups.free.remote()) == 2


def test_an_unknown_concurrency_group_is_an_error_that_names_those_there_are() -> None:
    class Plain:
        @stoker.method(concurrency_group="ios")
        def work(self) -> None:
            return None

    made = stoker.remote(concurrency_groups={"io": 2})
    error = caught(lambda: made(Plain), exceptions.BadRequestError)
    assert "'ios'" in str(error)
    assert "'io'" in str(error)

    @stoker.remote(concurrency_groups={"io": 1})
    class Other:
        def work(self) -> str:
            return "worked"

    other = Other.remote()
    error = caught(
        lambda: other.work.options(concurrency_group="nowhere"), exceptions.BadRequestError
    )
    assert "nowhere" in str(error)


def test_the_constructor_may_be_a_coroutine() -> None:
    @stoker.remote
    class Late:
        async def __init__(self, value: int, *, factor: int = 1) -> None:
            await asyncio.sleep(0.01)
            self.loop = asyncio.get_running_loop()
            self.value = value * factor

        async def read(self) -> tuple[int, bool]:
            return self.value, self.loop is asyncio.get_running_loop()

        def plain(self) -> int:
            return self.value

    late = Late.remote(3, factor=2)
    assert get([late.read.remote(), late.plain.remote()]) == [(6, True), 6]

    @stoker.remote
    class Broken:
        async def __init__(self) -> None:
            await asyncio.sleep(0)
            raise OSError("no disk")

    assert "no disk" in str(caught(lambda: get(Broken.remote().ready()), exceptions.ActorDiedError))


def test_blocking_code_in_one_group_of_an_async_actor_holds_up_no_other() -> None:
    @stoker.remote(concurrency_groups={"health": 1})
    class Groups:
        def __init__(self) -> None:
            self.event = threading.Event()

        async def work(self) -> bool:
            return self.event.wait(GET_S)

        @stoker.method(concurrency_group="health")
        async def ping(self) -> str:
            await asyncio.sleep(0)
            return threading.current_thread().name

        @stoker.method(concurrency_group="health")
        def release(self) -> None:
            self.event.set()

    groups = Groups.remote()
    work = groups.work.remote()
    assert "health" in get(groups.ping.remote())
    assert stoker.wait([work], timeout=0)[0] == []
    get(groups.release.remote())
    assert get(work) is True


def test_a_cancelled_call_of_a_group_sees_it() -> None:
    @stoker.remote(concurrency_groups={"io": 2})
    class Groups:
        @stoker.method(concurrency_group="io")
        async def wait(self) -> None:
            await asyncio.sleep(60)

        async def ping(self) -> str:
            return "here"

    groups = Groups.remote()
    ref = groups.wait.remote()
    get(groups.ping.remote())
    stoker.cancel(ref)
    assert "still runs" not in str(caught(lambda: get(ref), exceptions.TaskCancelledError))
