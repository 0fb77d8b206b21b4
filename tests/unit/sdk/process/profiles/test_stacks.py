"""The stacks of this process: other threads, and coroutines that wait."""

from __future__ import annotations

import asyncio
import threading

from stoker.runtime.process.profiles.stacks import worker_stacks


def test_other_threads_are_seen_and_this_one_is_not() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waits_here() -> None:
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=waits_here, name="waiter")
    thread.start()
    try:
        assert entered.wait(30)
        found = worker_stacks(("t_1",))
    finally:
        leave.set()
        thread.join(30)
    assert found.task_ids == ("t_1",)
    (waiter,) = [one for one in found.threads if one.name == "waiter"]
    assert any(frame.function.endswith("waits_here") for frame in waiter.frames)
    assert threading.current_thread().name not in [one.name for one in found.threads]


def test_a_coroutine_that_waits_is_seen_down_to_where_it_waits() -> None:
    entered = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def innermost() -> None:
        event = asyncio.Event()
        loops.append((asyncio.get_running_loop(), event))
        entered.set()
        await event.wait()

    async def outermost() -> None:
        await innermost()

    thread = threading.Thread(target=lambda: asyncio.run(outermost()))
    thread.start()
    try:
        assert entered.wait(30)
        frames: list[str] = []
        while not any(name.endswith("innermost") for name in frames):  # until it waits
            coroutines = worker_stacks(()).coroutines
            frames = [frame.function for one in coroutines for frame in one.frames]
    finally:
        loop, event = loops[0]
        loop.call_soon_threadsafe(event.set)
        thread.join(30)
    at = [index for index, name in enumerate(frames) if name.endswith(("innermost", "outermost"))]
    assert [frames[index].rpartition(".")[2] for index in at] == ["innermost", "outermost"]
