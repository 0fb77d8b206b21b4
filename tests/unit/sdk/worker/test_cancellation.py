"""The end of a worker whose call does not stop: in the order that hurts nobody else."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import TaskCancelledError
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
    cancellation = Cancellation(io, events, None, calls, worker)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "_exit", leave)
    cancellation._kill_worker(runs)
    with pytest.raises(Left):
        asyncio.run(work.pop())
    assert told == ["retires", "t_1 failed", "['t_2'] returned", "Retire", "closed"]
