"""The state that an actor saves is there after a crash, a restart and a move; nothing of it stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ActorDiedError, BadRequestError, TaskCancelledError
from stoker.runtime.current import runtime
from stoker.runtime.worker.actor_state.saved_state import SavedState
from stoker_wire.errors import UnavailableError
from tests.e2e._cluster import actor_record, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@stoker.remote(max_restarts=-1, max_task_retries=-1, concurrency_groups={"other": 20})
class AsyncGate:
    """Its calls of both groups end together."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.count = self.saves = self.waiting = 0

    async def add(self) -> int:
        with self.lock:
            self.waiting += 1
        while not self.gate.is_set():  # noqa: ASYNC110 - set by another loop
            await asyncio.sleep(0.01)
        with self.lock:
            self.count += 1
            return self.count

    @stoker.method(concurrency_group="other")
    async def add_other(self) -> int:
        return await AsyncGate.cls.add(self)

    async def open(self) -> int:
        while self.waiting < 70:  # noqa: ASYNC110 - counted by two loops
            await asyncio.sleep(0.01)
        self.gate.set()
        return os.getpid()

    async def read(self) -> tuple[int, int]:
        return self.count, self.saves

    async def __stoker_save__(self) -> tuple[int, int]:
        self.saves += 1
        with self.lock:
            count = self.count
        await asyncio.sleep(0.01)
        return count, self.saves

    def __stoker_restore__(self, state: Any) -> None:
        self.count, self.saves = state


@stoker.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=80)
class ThreadGate:
    """The same with threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.count = self.saves = self.waiting = 0

    def add(self) -> int:
        with self.lock:
            self.waiting += 1
        self.gate.wait(GET_S)
        with self.lock:
            self.count += 1
            return self.count

    def open(self) -> int:
        until(lambda: self.waiting == 70, GET_S, "all have begun")
        self.gate.set()
        return os.getpid()

    def read(self) -> tuple[int, int]:
        return self.count, self.saves

    def __stoker_save__(self) -> tuple[int, int]:
        self.saves += 1
        with self.lock:
            return self.count, self.saves

    def __stoker_restore__(self, state: Any) -> None:
        self.count, self.saves = state


@pytest.mark.parametrize("cls", [AsyncGate, ThreadGate], ids=["async", "threads"])
def test_calls_that_end_together_share_saves_and_none_that_was_answered_is_lost(cls: Any) -> None:
    gate = cls.remote()
    calls = [gate.add.remote() for _ in range(50)]
    calls += [getattr(gate, "add_other", gate.add).remote() for _ in range(20)]
    pid = stoker.get(gate.open.remote(), timeout=GET_S)
    for ref in calls[::4]:
        stoker.cancel(ref)
    answered = []
    for ref in calls:
        with contextlib.suppress(TaskCancelledError):
            answered.append(stoker.get(ref, timeout=GET_S))
    assert len(set(answered)) == len(answered) >= 52, (
        "only those that were cancelled have no answer"
    )
    os.kill(pid, signal.SIGKILL)
    count, saves = stoker.get(gate.read.remote(), timeout=GET_S)
    assert max(answered) <= count <= 70
    assert saves < 35, "calls that ended together were saved together"
    stoker.kill(gate)


@pytest.mark.parametrize("interval_s", [None, 1000.0])
def test_a_crash_loses_what_came_since_the_last_save(interval_s: float | None) -> None:
    counter = Counter.options(max_task_retries=-1, save_interval_s=interval_s).remote()
    assert stoker.get([counter.add.remote() for _ in range(3)], timeout=GET_S) == [1, 2, 3]
    os.kill(stoker.get(counter.pid.remote(), timeout=GET_S), signal.SIGKILL)
    assert stoker.get(counter.read.remote(), timeout=GET_S) == (0, 0)
    stoker.kill(counter)


def test_the_first_call_that_ends_after_the_interval_is_saved() -> None:
    counter = Counter.options(max_task_retries=-1, save_interval_s=0.3).remote()
    actor_id = counter._info.actor_id
    counts = []

    def saved() -> bool:
        counts.append(stoker.get(counter.add.remote(), timeout=GET_S))
        return actor_record(actor_id)["saved_at_s"] is not None

    until(saved, GET_S, "a state is saved")
    os.kill(stoker.get(counter.pid.remote(), timeout=GET_S), signal.SIGKILL)
    assert stoker.get(counter.read.remote(), timeout=GET_S)[0] in (counts[-1], counts[-1] + 1)
    stoker.kill(counter)


@pytest.mark.parametrize("cls", [Counter, AsyncCounter])
def test_an_actor_that_is_killed_to_be_restarted_goes_on_with_its_state(cls: Any) -> None:
    counter = cls.options(max_task_retries=-1).remote()
    assert stoker.get([counter.add.remote() for _ in range(3)], timeout=GET_S)[-1] == 3
    stoker.kill(counter, no_restart=False)
    assert stoker.get(counter.add.remote(), timeout=GET_S) == 4
    assert actor_record(counter._info.actor_id)["restarts"] == 1
    stoker.kill(counter)


@stoker.remote(max_restarts=-1, max_task_retries=-1)
class Unread(Counter.cls):
    """Its second process cannot read the state."""

    def __init__(self, path: str) -> None:
        super().__init__()
        with open(path, "a+") as file:
            file.write("started\n")
            file.seek(0)
            starts = len(file.readlines())
        if starts == 2:
            SavedState.load = _cannot_read  # type: ignore[method-assign]


def _cannot_read(self: SavedState) -> tuple[Any, ...]:
    raise UnavailableError("the state could not be read for 900 s")


def test_a_state_that_cannot_be_read_now_is_read_by_the_next_incarnation(tmp_path: Path) -> None:
    unread = Unread.remote(str(tmp_path / "starts"))
    assert stoker.get([unread.add.remote() for _ in range(3)], timeout=GET_S)[-1] == 3
    os.kill(stoker.get(unread.pid.remote(), timeout=GET_S), signal.SIGKILL)
    assert stoker.get(unread.read.remote(), timeout=GET_S) == (3, 0)
    assert actor_record(unread._info.actor_id)["restarts"] == 2
    stoker.kill(unread)


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
