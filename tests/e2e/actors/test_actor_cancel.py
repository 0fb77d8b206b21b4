"""Calls of actors that are to stop while they run: those that listen, and those that do not."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from stoker.runtime.tasks.streams import AHEAD
from tests.e2e._cluster import caught, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("c"), num_cpus=2, num_gpus=0) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


def test_a_sync_actor_can_be_told_to_stop_a_running_call() -> None:
    @stoker.remote
    class Long:
        def work(self) -> None:
            while True:
                time.sleep(0.01)

        def ping(self) -> str:
            return "here"

    long = Long.remote()
    get(long.ping.remote())
    ref = long.work.remote()
    ping = long.ping.remote()
    assert stoker.wait([ping], timeout=0.2)[0] == []
    stoker.cancel(ref)
    assert isinstance(caught(lambda: get(ref)), exceptions.TaskCancelledError)
    assert get(ping) == "here"


def test_a_call_with_a_timeout_ends_there_and_the_actor_goes_on() -> None:
    @stoker.remote
    class Slow:
        async def wait(self) -> None:
            await asyncio.sleep(60)

        async def ping(self) -> str:
            return "here"

    slow = Slow.remote()
    ref = slow.wait.options(timeout=0.3).remote()
    error = caught(lambda: get(ref), exceptions.TaskTimeoutError)
    assert "0.3" in str(error)
    assert get(slow.ping.remote()) == "here"


def test_a_call_of_a_thread_that_listens_stops_when_it_is_told() -> None:
    @stoker.remote(max_concurrency=2)
    class Polite:
        def work(self, fails: bool) -> str:
            here = stoker.get_runtime_context()
            until(here.is_cancelled, GET_S, "it is told")
            if fails:
                raise InterruptedError("stopped")
            return "what there is so far"

        def ping(self) -> str:
            return "here"

    polite = Polite.remote()
    get(polite.ping.remote())
    for kind, stop in (
        (exceptions.TaskCancelledError, stoker.cancel),
        (exceptions.TaskTimeoutError, None),
    ):
        ref = polite.work.options(timeout=None if stop else 0.2).remote(fails=stop is None)
        get(polite.ping.remote())
        if stop is not None:
            stop(ref)
        error = caught(lambda ref=ref: get(ref), kind)
        assert "still runs" not in str(error)
        assert get(polite.ping.remote()) == "here"


@stoker.remote
class Deaf:
    """Methods that do not stop when they are told to."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def swallow(self) -> str:
        while not self.event.wait(0.02):
            try:
                time.sleep(60)
            except (KeyboardInterrupt, exceptions.TaskTimeoutError):
                self.event.wait(GET_S)
        return "late"

    def thread(self) -> str:
        self.event.wait(GET_S)
        return "late"

    def stream(self) -> Iterator[int]:
        yield 1
        self.event.wait(GET_S)
        yield 2

    def endless(self, path: str) -> Iterator[int]:
        for number in range(1_000_000_000):
            with open(path, "w") as file:
                file.write(str(number))
            yield number

    def release(self) -> None:
        self.event.set()


def made(path: str) -> bool:
    return os.path.exists(path)


@stoker.remote
class DeafLoop:
    async def ignore(self, path: str) -> str:
        while not made(path):
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        return "late"

    async def block(self, path: str) -> str:
        await asyncio.sleep(0)
        self.stand_still(path)
        return "late"

    def stand_still(self, path: str) -> None:
        until(lambda: os.path.exists(path), GET_S, f"{path} is made")

    async def ping(self) -> str:
        return "here"


def state_of(ref: Any) -> str | None:
    """What the history says of a call."""
    try:
        found = stoker.runtime.current.runtime().job.http.call(
            "GET", f"/v1/tasks/{ref.task_id}", reply=dict[str, Any]
        )
    except exceptions.NotFoundError:
        return None
    return str(found["state"])


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize("kind", ["sync", "thread", "ignore", "block"])
def test_the_caller_of_a_call_that_does_not_stop_is_told_that_it_still_runs(
    kind: str, how: str, tmp_path: Path
) -> None:
    deaf: Any
    path = [str(tmp_path / "go")] if kind in ("ignore", "block") else []
    if kind == "sync":
        deaf = Deaf.remote()
        method = deaf.swallow
    elif kind == "thread":
        deaf = Deaf.options(max_concurrency=2).remote()
        method = deaf.thread
    else:
        deaf = DeafLoop.remote()
        method = getattr(deaf, kind)
    get(deaf.ready())
    expected: type[Exception]
    if how == "cancel":
        ref = method.remote(*path)
        until(lambda: state_of(ref) == "RUNNING", GET_S, "it runs")
        stoker.cancel(ref)
        expected = exceptions.TaskCancelledError
    else:
        ref = method.options(timeout=3).remote(*path)
        expected = exceptions.TaskTimeoutError
    error = caught(lambda: get(ref), expected)
    assert "it still runs in actor Deaf" in str(error)
    assert deaf.actor_id in str(error)
    assert "stoker.kill()" in str(error)
    if kind == "thread":
        get(deaf.release.remote())
    if path:
        (tmp_path / "go").touch()
        assert get(deaf.ping.remote()) == "here"
    state = "CANCELLED" if how == "cancel" else "FAILED"
    until(lambda: state_of(ref) == state, GET_S, f"the history has it as {state}")
    stoker.kill(deaf)


def test_a_stream_of_a_thread_that_was_cancelled_ends() -> None:
    deaf = Deaf.options(max_concurrency=2).remote()
    stream = deaf.stream.remote()
    assert get(next(stream)) == 1
    stoker.cancel(stream)
    error = caught(lambda: [get(ref) for ref in stream], exceptions.TaskCancelledError)
    assert "still runs" in str(error)
    get(deaf.release.remote())
    assert get(deaf.__stoker_terminate__.remote()) is None


def test_a_cancelled_stream_that_waits_for_its_reader_frees_its_thread(tmp_path: Path) -> None:
    deaf = Deaf.options(max_concurrency=2).remote()
    paths = [tmp_path / name for name in "ab"]
    streams = [deaf.endless.remote(str(path)) for path in paths]
    for path in paths:
        until(lambda p=path: p.exists() and p.read_text() == str(AHEAD), GET_S, "no more is made")
    for stream in streams:
        stoker.cancel(stream)
    get(deaf.release.remote())  # before anything is read, which would let the streams go on
    for stream in streams:
        caught(lambda s=stream: [get(ref) for ref in s], exceptions.TaskCancelledError)


def test_force_is_refused_for_calls_of_actors(tmp_path: Path) -> None:
    deaf = DeafLoop.remote()
    get(deaf.ping.remote())
    ref = deaf.ignore.remote(str(tmp_path / "go"))
    error = caught(lambda: stoker.cancel(ref, force=True), exceptions.BadRequestError)
    assert error.field == "force"
    assert "stoker.kill(actor)" in str(error)
    (tmp_path / "go").touch()
    assert get(ref) == "late"
