"""The end of a worker whose call does not stop: in the order that hurts nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import TaskCancelledError, TaskTimeoutError
from stoker.runtime.worker.cancellation import Cancellation


class Left(BaseException):
    """In place of the end of the process."""


class FakeChannel:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def post(self, message: object) -> None:
        self._told.append(type(message).__name__)

    async def close(self) -> None:
        self._told.append("closed")


def test_the_nodelet_knows_before_the_caller_that_a_worker_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    work: list[Any] = []

    async def retire() -> None:
        await asyncio.sleep(0)
        told.append("retires")

    def leave(code: int) -> None:
        raise Left

    def received(task_id: str) -> Any:
        return SimpleNamespace(
            call=SimpleNamespace(task_id=task_id),
            channel=FakeChannel(told),
            stop_error=TaskCancelledError("it was cancelled"),
        )

    runs, waits = received("t_1"), received("t_2")
    worker: Any = SimpleNamespace(
        actor=None,
        retire=retire,
        fail_early=lambda received, failed: told.append(f"{received.call.task_id} failed"),
        return_calls=lambda channel, task_ids: told.append(f"{task_ids} returned"),
    )
    io: Any = SimpleNamespace(
        background=SimpleNamespace(spawn=lambda coroutine, name: work.append(coroutine))
    )
    events: Any = SimpleNamespace(write=lambda: None)
    calls: Any = SimpleNamespace(running={"t_1": runs}, queued={"t_2": waits})
    deadline = SimpleNamespace(leave=lambda task_id, within_s: told.append(f"leaves for {task_id}"))
    cancellation = Cancellation(io, events, None, calls, worker, deadline)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "_exit", leave)
    cancellation._kill_worker(runs)
    with pytest.raises(Left):
        asyncio.run(work.pop())
    assert told == [
        "leaves for t_1",
        "retires",
        "t_1 failed",
        "['t_2'] returned",
        "Retire",
        "closed",
    ]


def test_a_signal_interrupts_the_call_that_it_is_for_and_nothing_after_it() -> None:
    received: Any = SimpleNamespace(call=SimpleNamespace(task_id="t_1"), stop_error=None)
    calls: Any = SimpleNamespace(running={"t_1": received}, queued={})
    nothing: Any = None
    cancellation = Cancellation(nothing, nothing, nothing, calls, nothing, nothing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cancellation.interruptible(received):
            cancellation._on_signal(signal.SIGUSR1, None)  # of a call before
            received.stop_error = TaskCancelledError("it was cancelled")
            with pytest.raises(KeyboardInterrupt):
                cancellation._on_signal(signal.SIGUSR1, None)
            cancellation._on_signal(signal.SIGUSR1, None)  # once, for its cleanup takes time
        cancellation._on_signal(signal.SIGUSR1, None)  # it came late
        with pytest.raises(TaskCancelledError), cancellation.interruptible(received):
            raise AssertionError("it does not begin")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_timeout_raises_its_own_error() -> None:
    received: Any = SimpleNamespace(
        call=SimpleNamespace(task_id="t_1"), stop_error=TaskTimeoutError("it ran too long")
    )
    calls: Any = SimpleNamespace(running={"t_1": received}, queued={})
    nothing: Any = None
    cancellation = Cancellation(nothing, nothing, nothing, calls, nothing, nothing)
    cancellation._user_code_of = "t_1"
    with pytest.raises(TaskTimeoutError, match="too long"):
        cancellation._on_signal(signal.SIGUSR1, None)
