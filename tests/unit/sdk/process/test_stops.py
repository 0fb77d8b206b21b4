"""The notice of a stop, for all who wait for it, and the callbacks that it runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker.exceptions import BadRequestError
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.process.stops import PreemptionNotice, Stops


def worker() -> Stops:
    stops = Stops()
    stops.lease_began()
    return stops


async def test_a_notice_is_awaited_polled_and_waited_for() -> None:
    stops = worker()
    notice = stops.notice
    assert not notice.is_set() and not notice.wait(0)
    waiting = asyncio.ensure_future(_until(notice))
    in_thread = asyncio.ensure_future(asyncio.to_thread(notice.wait, 20.0))
    await asyncio.sleep(0)
    before_s = time.time()
    assert await stops.give("for another", 5.0) == 0
    assert await waiting is notice and await in_thread
    assert await _until(notice) is notice, "also when it was given before"
    assert notice.reason == "for another"
    assert notice.deadline_s is not None and notice.deadline_s >= before_s + 5.0


async def _until(notice: PreemptionNotice) -> PreemptionNotice:
    return await notice


async def test_callbacks_run_in_order_off_the_loop_each_with_the_notice() -> None:
    stops, ran = worker(), []

    def first(notice: PreemptionNotice) -> None:
        ran.append(("first", notice.reason, threading.current_thread().name))
        raise ValueError("this one fails")

    def second(notice: PreemptionNotice) -> None:
        ran.append(("second", notice.reason, threading.current_thread().name))

    stops.add(first)
    stops.add(second)
    assert await stops.give("why", 5.0) == 2
    assert ran == [("first", "why", "on-stop"), ("second", "why", "on-stop")]


async def test_a_coroutine_function_runs_on_the_loop_that_registered_it() -> None:
    stops, loops = worker(), []

    async def save(notice: PreemptionNotice) -> None:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())

    stops.add(save)
    await asyncio.to_thread(stops.add, save)  # no loop runs there: it gets one of its own
    assert await stops.give("why", 5.0) == 2
    own, other = loops
    assert own is asyncio.get_running_loop() and other is not own


async def test_callbacks_end_with_their_task_and_those_of_an_actor_with_its_lease() -> None:
    stops = worker()
    for info in (TaskInfo("t_1", "f", 0), TaskInfo("t_2", "m", 0, actor_id="a_1")):
        token = current_task.set(info)
        stops.add(lambda notice: None)
        current_task.reset(token)
    stops.task_ended("t_1")
    stops.task_ended("t_2")
    assert len(stops.registered) == 1, "that of the actor"
    given = stops.notice
    await stops.give("why", 5.0)
    stops.lease_began()
    assert not stops.registered and not stops.notice.is_set() and stops.notice is not given


def test_the_notice_of_a_driver_is_sigterm_after_which_it_exits() -> None:
    program = (
        "import os, signal, stoker\n"
        "stoker.on_stop(lambda notice: print(notice.reason, flush=True))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('not reached')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (128 + 15, "this process was sent SIGTERM\n")


@pytest.mark.parametrize("before", [False, True])
def test_a_coroutine_function_runs_in_a_driver_whose_main_thread_runs_a_loop(before: bool) -> None:
    program = f"""
import asyncio, os, signal, stoker
async def save(notice):
    await asyncio.sleep(0.1)
    print("saved", flush=True)
async def main():
    if not {before}:
        stoker.on_stop(save)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)
if {before}:
    stoker.on_stop(save)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (143, "saved\n"), done.stderr


def test_a_thread_of_a_driver_cannot_be_the_first_to_register() -> None:
    stops = Stops()
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(stops.add, lambda notice: None).exception()
    assert isinstance(error, BadRequestError) and "main thread" in str(error)
