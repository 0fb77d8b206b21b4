"""A cancel is Ctrl-C: what the code of a task, its handlers and its processes see, and whom it never hits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import TaskCancelledError, TaskTimeoutError
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Cluster

LONG_S = 1000
TRAP = """
import signal, sys, time
def told(*_):
    open(sys.argv[1] + "/told", "a").write("x")
    sys.exit(3)
signal.signal(signal.SIGINT, told)
open(sys.argv[1] + "/runs", "w")
time.sleep(1000)
"""
"""A program that says when it runs, and when it gets SIGINT, upon which it ends."""


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


def trap(flags: Flags) -> list[str]:
    return [sys.executable, "-c", TRAP, str(flags.folder)]


def attend(command: list[str]) -> None:
    """Run a program to its end; unlike ``subprocess.run``, which kills it 0.25 s after a Ctrl-C."""
    subprocess.Popen(command).wait()


def cancelled(flags: Flags, how: Callable[[], Any], **options: Any) -> Any:
    """The ref of a task that was cancelled while it ran ``how``, which says when it ``runs``."""
    ref = stoker.remote(max_retries=0, **options)(how).remote()
    flags.wait("runs")
    stoker.cancel(ref)
    return ref


def test_the_handler_of_the_task_runs_once_and_its_result_counts(flags: Flags) -> None:
    def work() -> list[int]:
        came: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        flags.raise_("runs")
        until(lambda: came, 40, "SIGINT comes")
        time.sleep(0.2)  # a second one would come within 0.05 s
        return came

    assert get(cancelled(flags, work)) == [signal.SIGINT]


def test_what_the_cleanup_raises_is_a_cancelled_task(flags: Flags) -> None:
    def work() -> None:
        try:
            flags.raise_("runs")
            time.sleep(LONG_S)
        except KeyboardInterrupt:
            raise ValueError("in the cleanup") from None

    with pytest.raises(TaskCancelledError, match="was cancelled"):
        get(cancelled(flags, work))


def test_except_exception_does_not_hide_a_cancel(flags: Flags) -> None:
    def work() -> None:
        while True:
            with contextlib.suppress(Exception):
                flags.raise_("runs")
                time.sleep(LONG_S)

    with pytest.raises(TaskCancelledError):
        get(cancelled(flags, work))


def test_a_task_without_a_handler_by_its_own_will_ends_with_its_worker(flags: Flags) -> None:
    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        flags.raise_("runs")
        time.sleep(LONG_S)

    with pytest.raises(TaskCancelledError):
        get(cancelled(flags, work))


def test_a_coroutine_is_cancelled_and_a_loops_own_handler_runs(flags: Flags) -> None:
    async def sleeps() -> None:
        try:
            flags.raise_("runs")
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            flags.raise_("told")
            raise

    async def handles() -> str:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.set)
        flags.raise_("runs")
        await came.wait()
        return "saved"

    with pytest.raises(TaskCancelledError):
        get(cancelled(flags, sleeps))
    flags.wait("told")
    (flags.folder / "runs").unlink()
    assert get(cancelled(flags, handles)) == "saved"


def test_a_generator_sees_it_and_its_stream_ends(flags: Flags) -> None:
    @stoker.remote(max_retries=0)
    def items() -> Any:
        yield 1
        try:
            flags.raise_("runs")
            time.sleep(LONG_S)
        except KeyboardInterrupt:
            flags.raise_("told")
            raise

    stream = items.remote()
    assert get(next(stream)) == 1
    flags.wait("runs")
    stoker.cancel(stream)
    with pytest.raises(TaskCancelledError):
        get(next(stream))
    flags.wait("told")


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["run", "shell", "os.system"])
def test_what_a_task_runs_in_the_foreground_gets_sigint_too(how: str, flags: Flags) -> None:
    def work() -> None:
        command = trap(flags)
        quoted = subprocess.list2cmdline(command[:2]) + f" '{TRAP}' {flags.folder}; echo"
        if how == "run":
            attend(command)
        elif how == "shell":
            subprocess.run(quoted, shell=True, check=False)
        else:
            os.system(quoted)  # ignores SIGINT itself, and returns when its process has ended
        time.sleep(LONG_S)

    with pytest.raises(TaskCancelledError):
        get(cancelled(flags, work))
    assert flags.wait("told") == "x"


def test_what_left_the_process_group_does_not(flags: Flags) -> None:
    def work() -> None:
        apart = subprocess.Popen(trap(flags), start_new_session=True)
        try:
            time.sleep(LONG_S)
        except KeyboardInterrupt:
            flags.raise_("interrupted", apart.poll())
            raise
        finally:
            apart.kill()
            apart.wait()

    with pytest.raises(TaskCancelledError):
        get(cancelled(flags, work))
    assert flags.wait("interrupted") == "None"
    assert not flags.is_up("told")


def test_a_timeout_interrupts_them_and_raises_its_error_in_the_code(flags: Flags) -> None:
    @stoker.remote(max_retries=0, timeout=4)
    def work() -> None:
        try:
            subprocess.Popen(trap(flags))
            time.sleep(LONG_S)
        except TaskTimeoutError as error:
            flags.raise_("raised", error)
            raise

    with pytest.raises(TaskTimeoutError):
        get(work.remote())
    assert "timeout of 4 s" in flags.wait("raised")
    flags.wait("told")


def test_a_method_is_interrupted_with_its_processes_and_the_actors_own_live_on(
    flags: Flags,
) -> None:
    @stoker.remote
    class Server:
        def __init__(self) -> None:
            self.engine = subprocess.Popen(["sleep", str(LONG_S)])
            time.sleep(0.05)  # times of starts are told in hundredths of a second

        def work(self) -> None:
            attend(trap(flags))
            time.sleep(LONG_S)

        def serves(self) -> bool:
            return self.engine.poll() is None

    server = Server.remote()
    assert get(server.serves.remote())
    ref = server.work.remote()
    flags.wait("runs")
    stoker.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    flags.wait("told")
    assert get(server.serves.remote())
    stoker.kill(server)


# -- the next task -----------------------------------------------------------------------------------


def test_a_handler_lasts_until_the_end_of_its_task(flags: Flags) -> None:
    @stoker.remote
    def deafens() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return os.getpid()

    def work() -> None:
        flags.raise_("runs", os.getpid())
        time.sleep(LONG_S)

    pid = get(deafens.remote())
    ref = cancelled(flags, work)
    assert flags.wait("runs") == str(pid), "one worker runs both"
    with pytest.raises(TaskCancelledError):
        get(ref)


def test_what_an_earlier_task_left_running_is_not_interrupted(flags: Flags) -> None:
    @stoker.remote
    def leaves() -> tuple[int, int]:
        left = subprocess.Popen(["sleep", str(LONG_S)])
        time.sleep(0.05)  # times of starts are told in hundredths of a second
        return os.getpid(), left.pid

    def work() -> None:
        flags.raise_("runs", os.getpid())
        time.sleep(LONG_S)

    worker, left = get(leaves.remote())
    ref = cancelled(flags, work)
    assert flags.wait("runs") == str(worker), "one worker runs both"
    with pytest.raises(TaskCancelledError):
        get(ref)
    try:
        with open(f"/proc/{left}/stat") as stat:
            assert stat.read().rpartition(")")[2].split()[0] == "S"
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_cancel_hits_its_own_task_and_no_other(seed: int) -> None:
    """Cancels that come before, while and after a task runs, among others that no cancel is for."""

    @stoker.remote(max_retries=0)
    def work(number: int, length_s: float) -> int:
        until_s = time.perf_counter() + length_s
        while time.perf_counter() < until_s:
            if number % 3 == 0:
                time.sleep(length_s / 4)
            elif number % 3 == 1:
                stoker.get(stoker.put(number))
        if number % 20 == 0:
            subprocess.run(["true"], check=True)
        return number

    rng = random.Random(seed)
    for _ in range(6):
        refs = [work.remote(number, rng.uniform(0, 0.004)) for number in range(100)]
        chosen = set(rng.sample(range(100), 40))
        for number in sorted(chosen, key=lambda _: rng.random()):
            stoker.cancel(refs[number])
            time.sleep(rng.choice([0, 0, 0.001]))
        for number, ref in enumerate(refs):
            try:
                assert get(ref) == number
            except TaskCancelledError:
                assert number in chosen, f"{number} was not cancelled (seed {seed})"
