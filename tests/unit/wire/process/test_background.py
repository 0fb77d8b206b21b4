"""Background tasks have names, crash aloud, and are gone after close."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from stoker_wire.process.background import Background, GeneratorTasks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


async def _crash() -> None:
    raise ValueError("broken")


async def test_close_cancels_and_awaits_all() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async with Background("nodelet") as background:
        task = background.spawn(work("a"), name="a")
        background.spawn(work("b"), name="b")
        assert task.get_name() == "nodelet.a"
        assert len(background) == 2
        await asyncio.sleep(0)
    assert sorted(ended) == ["a", "b"]
    assert len(background) == 0


async def test_what_is_being_closed_is_closed_and_not_cancelled() -> None:
    ended: list[str] = []

    async def close() -> None:
        await asyncio.sleep(0.01)
        ended.append("closed")

    async with Background("scheduler") as background:
        background.close_later(close(), name="n_1")
    assert ended == ["closed"]


async def test_the_close_of_a_generator_is_no_error_of_its_tasks() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def numbers() -> AsyncGenerator[int, None]:
        async with GeneratorTasks() as group:
            task = group.create_task(work())
            try:
                while True:
                    await asyncio.sleep(0)
                    yield 1
            finally:
                task.cancel()

    source = numbers()
    assert await anext(source) == 1
    await source.aclose()
    assert ended == ["work"]


async def test_a_crash_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []
    async with Background("n", on_crash=lambda name, e: told.append((name, str(e)))) as background:
        await asyncio.wait([background.spawn(_crash(), name="x")])
        await asyncio.sleep(0)
    assert told == [("n.x", "broken")]
    assert "task n.x crashed: broken" in caplog.text


async def test_an_awaited_task_reports_to_its_caller_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Background("n") as background:
        with pytest.raises(ValueError, match="broken"):
            await background.spawn(_crash(), name="x", report=False)
    assert caplog.text == ""


async def test_a_task_that_ignores_its_cancel_is_named(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    background = Background("n")
    task = background.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await background.close(timeout_s=0.01)
    assert "n.stubborn did not end" in caplog.text
    release.set()
    await task


async def test_nothing_starts_after_close() -> None:
    background = Background("n")
    await background.close()
    with pytest.raises(RuntimeError, match="n is closed"):
        background.spawn(_crash(), name="late")
