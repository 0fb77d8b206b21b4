"""The state that an actor saves is there after a crash, a restart and a move; nothing of it stays behind."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ActorDiedError, BadRequestError
from stoker.runtime.current import runtime
from tests.e2e._cluster import embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=2) as info:
        yield info


@stoker.remote(max_restarts=-1)
class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.blob = b""

    def add(self, nbytes: int = 0) -> int:
        self.count += 1
        self.blob = b"x" * nbytes
        return self.count

    def read(self) -> tuple[int, int]:
        return self.count, len(self.blob)

    def pid(self) -> int:
        return os.getpid()

    def __stoker_save__(self) -> Any:
        return self.count, self.blob

    def __stoker_restore__(self, state: Any) -> None:
        self.count, self.blob = state


@stoker.remote(max_restarts=-1)
class AsyncCounter:
    def __init__(self) -> None:
        self.count = 0

    async def add(self) -> int:
        self.count += 1
        return self.count

    async def pid(self) -> int:
        return os.getpid()

    async def __stoker_save__(self) -> int:
        return self.count

    async def __stoker_restore__(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize("nbytes", [0, 1 << 20])
def test_a_killed_process_loses_no_call_that_was_answered(nbytes: int) -> None:
    counter = Counter.options(max_task_retries=-1).remote()
    stoker.get([counter.add.remote(nbytes) for _ in range(5)], timeout=GET_S)
    os.kill(stoker.get(counter.pid.remote(), timeout=GET_S), signal.SIGKILL)
    assert stoker.get(counter.read.remote(), timeout=GET_S) == (5, nbytes)
    stoker.kill(counter)


def test_the_hooks_of_an_async_actor_are_awaited() -> None:
    counter = AsyncCounter.options(max_task_retries=-1).remote()
    assert stoker.get([counter.add.remote() for _ in range(3)][-1], timeout=GET_S) == 3
    os.kill(stoker.get(counter.pid.remote(), timeout=GET_S), signal.SIGKILL)
    assert stoker.get(counter.add.remote(), timeout=GET_S) == 4
    stoker.kill(counter)


def test_an_actor_killed_for_good_leaves_no_state() -> None:
    client = runtime().job.http

    def states() -> list[Any]:
        query = {"namespace": "stoker.actors"}
        page = client.call("GET", "/v1/detached-objects", reply=dict[str, Any], query=query)
        return list(page["items"])

    counter = Counter.remote()
    stoker.get(counter.add.remote(), timeout=GET_S)
    assert states()
    stoker.kill(counter)
    until(lambda: not states(), GET_S, "the state is freed")


def test_a_class_with_one_hook_is_refused_with_the_name_of_the_other() -> None:
    class Half:
        def __stoker_save__(self) -> int:
            return 1

    with pytest.raises(BadRequestError, match="Half has no __stoker_restore__"):
        stoker.remote(Half)


@stoker.remote(max_restarts=-1)
class Picky(Counter.cls):
    """Its hooks raise."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def __stoker_save__(self) -> Any:
        if self.fails == "save":
            raise ValueError("not now")
        return self.count

    def __stoker_restore__(self, state: Any) -> None:
        raise ValueError("no such count")


def test_a_save_that_raises_does_not_end_the_actor() -> None:
    picky = Picky.remote("save")
    assert stoker.get([picky.add.remote() for _ in range(3)], timeout=GET_S) == [1, 2, 3]
    stoker.kill(picky)


def test_a_restore_that_raises_ends_the_actor_and_is_named() -> None:
    picky = Picky.options(max_task_retries=-1).remote("restore")
    os.kill(stoker.get(picky.pid.remote(), timeout=GET_S), signal.SIGKILL)
    with pytest.raises(
        ActorDiedError, match=r"(?s)no such count.*__stoker_restore__|__stoker_restore__"
    ):
        stoker.get(picky.add.remote(), timeout=GET_S)
