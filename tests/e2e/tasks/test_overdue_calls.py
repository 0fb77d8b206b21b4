"""Limits hold whatever a worker does: one that holds the interpreter, or is stopped, cannot enforce them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import stoker
from stoker.exceptions import NotFoundError, TaskCancelledError, TaskTimeoutError
from tests.e2e._silence import FOR_EVER_S, hold_the_interpreter, stop_the_process
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Cluster

LIMIT_S = 30.0
"""What is stopped ends within seconds; if not, its own end is far beyond this."""
TIMEOUT_S = 3.0
"""Within it a task begins to run, on a busy machine too."""


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


silent = pytest.mark.parametrize("fall_silent", [hold_the_interpreter, stop_the_process])


def runs(flags: Flags, fall_silent: Callable[[], None], **options: Any) -> Any:
    """A task that falls silent once it has started."""

    @stoker.remote(max_retries=0, **options)
    def work() -> None:
        flags.raise_("runs", os.getpid())
        fall_silent()

    return work


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@silent
def test_a_timeout_ends_the_task_and_its_worker(flags: Flags, fall_silent: Any) -> None:
    ref = runs(flags, fall_silent, timeout=TIMEOUT_S).remote()
    pid = int(flags.wait("runs"))
    with pytest.raises(TaskTimeoutError, match="ran longer than its timeout of 3 s"):
        get(ref, LIMIT_S)
    until(lambda: has_ended(pid), LIMIT_S, "its worker is killed")


@silent
def test_a_timeout_holds_while_the_owner_of_the_task_is_stopped(
    flags: Flags, fall_silent: Any
) -> None:
    @stoker.remote(timeout=2.0)
    def child() -> None:
        flags.note("child", os.getpid())
        fall_silent()

    @stoker.remote(max_retries=0)
    def owner() -> str:
        ref = child.remote()
        flags.raise_("owner", os.getpid())
        try:
            stoker.get(ref)
        except TaskTimeoutError as error:
            return str(error)
        return ""

    ref = owner.remote()
    owner_pid = int(flags.wait("owner"))
    until(lambda: flags.notes("child"), LIMIT_S, "the child runs")
    os.kill(owner_pid, signal.SIGSTOP)
    try:
        (pid,) = flags.notes("child")
        until(lambda: has_ended(int(pid)), LIMIT_S, "its worker is killed, though nobody asks")
    finally:
        os.kill(owner_pid, signal.SIGCONT)
    assert "ran longer than its timeout of 2 s" in get(ref, LIMIT_S)
    assert len(flags.notes("child")) == 1, "it is not tried again"


@silent
def test_a_forced_cancel_ends_the_task_and_its_worker(flags: Flags, fall_silent: Any) -> None:
    ref = runs(flags, fall_silent).remote()
    pid = int(flags.wait("runs"))
    stoker.cancel(ref, force=True)
    with pytest.raises(TaskCancelledError):
        get(ref, LIMIT_S)
    until(lambda: has_ended(pid), LIMIT_S, "its worker is killed")


@silent
def test_a_task_that_is_silent_from_its_start_is_listed_as_running(
    cluster: Cluster, flags: Flags, fall_silent: Any
) -> None:
    @stoker.remote(num_cpus=4, max_retries=0)
    def work(silent: bool) -> None:
        if silent:
            flags.raise_("runs", os.getpid())
            fall_silent()

    get(work.remote(False), LIMIT_S)  # what it imports is there: it takes no time to begin
    ref = work.remote(True)
    pid = int(flags.wait("runs"))

    def running() -> dict[str, Any] | None:
        try:
            (attempt,) = cluster.call("GET", f"/v1/tasks/{ref.task_id}/attempts")["items"]
        except NotFoundError:
            return None
        return attempt if attempt["state"] == "RUNNING" else None

    attempt = until(running, LIMIT_S, "it is listed as running")
    assert attempt["submitted_at_s"] <= attempt["started_at_s"] <= time.time()
    assert attempt["worker_id"].startswith("w_")
    stoker.cancel(ref, force=True)
    with pytest.raises(TaskCancelledError):
        get(ref, LIMIT_S)
    until(lambda: has_ended(pid), LIMIT_S, "its worker is killed")


def test_calls_behind_an_overdue_one_run_elsewhere(flags: Flags) -> None:
    @stoker.remote(num_cpus=4, timeout=TIMEOUT_S)
    def sometimes(number: int) -> int:
        if number == 3:
            flags.note("overdue")
            hold_the_interpreter()
        return number

    assert get([sometimes.remote(number) for number in range(50, 100)], LIMIT_S)[0] == 50
    refs = [sometimes.remote(number) for number in range(20)]
    for number, ref in enumerate(refs):
        if number == 3:
            with pytest.raises(TaskTimeoutError):
                get(ref, LIMIT_S)
        else:
            assert get(ref, LIMIT_S) == number
    assert len(flags.notes("overdue")) == 1, "it is not tried again"


def test_a_timeout_does_not_count_while_arguments_come_or_others_run(flags: Flags) -> None:
    @stoker.remote(num_cpus=4, timeout=3.0)
    def slow(number: int) -> int:
        if number == 0:
            flags.wait("go", LIMIT_S)
        return number

    refs = [slow.options(timeout=60.0).remote(0), *(slow.remote(n) for n in range(1, 4))]
    stoker.wait(
        refs, num_returns=4, timeout=8.0
    )  # longer than the limit and the grace of the others
    flags.raise_("go")
    assert get(refs, LIMIT_S) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fall_silent", "how"), [(hold_the_interpreter, "timeout"), (stop_the_process, "cancel")]
)
def test_a_call_of_an_actor_that_is_silent_fails_and_the_actor_is_told_how_to_end(
    flags: Flags, fall_silent: Any, how: str
) -> None:
    @stoker.remote
    class Host:
        def work(self) -> None:
            flags.raise_("runs", os.getpid())
            fall_silent()

    host: Any = Host.remote()
    call = host.work.options(timeout=TIMEOUT_S) if how == "timeout" else host.work
    ref = call.remote()
    pid = int(flags.wait("runs"))
    if how == "cancel":
        until(lambda: is_stopped(pid), LIMIT_S, "it is stopped: before, a cancel ends its call")
        stoker.cancel(ref)
    kind = TaskTimeoutError if how == "timeout" else TaskCancelledError
    with pytest.raises(kind, match=r"(?s)does not answer.*stoker\.kill\(\)"):
        get(ref, LIMIT_S)
    assert not has_ended(pid)
    stoker.kill(host)
    until(lambda: has_ended(pid), LIMIT_S, "kill ends what does not answer")


def test_a_timeout_of_an_actors_call_does_not_count_while_an_earlier_one_runs(
    flags: Flags,
) -> None:
    @stoker.remote
    class Host:
        def hold(self, seconds: int) -> None:
            ctypes.PyDLL(None).sleep(seconds)

        def count(self) -> int:
            flags.note("counted")
            return len(flags.notes("counted"))

    host: Any = Host.remote()
    get(host.ready())
    first = host.hold.remote(8)  # longer than the limit and the grace of the next
    behind = host.count.options(timeout=TIMEOUT_S).remote()
    assert get([first, behind], LIMIT_S) == [None, 1]
    silent = host.hold.options(timeout=TIMEOUT_S).remote(FOR_EVER_S)
    with pytest.raises(TaskTimeoutError, match="does not answer"):
        get(silent, LIMIT_S)
    assert len(flags.notes("counted")) == 1
    stoker.kill(host)


def test_a_call_of_an_actor_that_was_given_up_does_not_run_later(flags: Flags) -> None:
    @stoker.remote(concurrency_groups={"io": 1})
    class Host:
        def work(self) -> None:
            flags.raise_("runs", os.getpid())
            stop_the_process()
            flags.wait("go")

        def touch(self) -> None:
            flags.note("touched")

        def read(self) -> str:
            return "read"

        @stoker.method(concurrency_group="io")
        def ping(self) -> str:
            return "pong"

    @stoker.remote(num_cpus=0)
    def other_caller(host: Any) -> None:
        get(host.work.remote())

    host: Any = Host.remote()
    assert get(host.ping.remote()) == "pong", "there is a connection"
    other = other_caller.remote(host)
    pid = int(flags.wait("runs"))
    behind = host.touch.options(timeout=TIMEOUT_S).remote()
    with pytest.raises(TaskTimeoutError, match="does not answer"):
        get(behind, LIMIT_S)
    os.kill(pid, signal.SIGCONT)
    assert get(host.ping.remote()) == "pong", "it has read all that was sent before"
    flags.raise_("go")
    assert get([other, host.read.remote()]) == [None, "read"]
    assert flags.notes("touched") == []
