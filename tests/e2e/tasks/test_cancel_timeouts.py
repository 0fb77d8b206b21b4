"""Cancel, timeout and start_deadline end to end: what ends, how fast, and with which error."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import (
    BadRequestError,
    ObjectLostError,
    TaskCancelledError,
    TaskTimeoutError,
)
from tests.e2e.conftest import WAIT_S, Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Cluster


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


@stoker.remote
def same(x: Any) -> Any:
    return x


def runs(flags: Flags, how: Callable[[], None], **options: Any) -> Any:
    """A task that has started and goes on with ``how`` until it is stopped."""

    @stoker.remote(**options)
    def work() -> str:
        flags.raise_("runs", os.getpid())
        try:
            how()
        except KeyboardInterrupt:
            flags.raise_("told")
            raise
        return "done"

    ref = work.remote()
    flags.wait("runs")
    return ref


def sleeps() -> None:
    time.sleep(60)


def spins() -> None:
    while True:
        pass


def waits_on_a_lock() -> None:
    threading.Event().wait(60)


def gets() -> None:
    @stoker.remote
    def forever() -> None:
        time.sleep(60)

    stoker.get(forever.remote())


def awaits() -> None:
    import asyncio

    asyncio.run(asyncio.sleep(60))


def reads_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


@pytest.mark.parametrize("how", [sleeps, spins, waits_on_a_lock, gets, awaits, reads_a_pipe])
def test_a_running_task_is_told_at_once_whatever_it_does(
    how: Callable[[], None], flags: Flags
) -> None:
    ref = runs(flags, how)
    stoker.cancel(ref)
    with pytest.raises(TaskCancelledError, match="was cancelled"):
        get(ref)
    flags.wait("told")
    assert os.path.exists(f"/proc/{flags.wait('runs')}"), "the worker lives on"


def test_a_cancelled_task_is_not_retried(flags: Flags) -> None:
    ref = runs(flags, sleeps, max_retries=5, retry_exceptions=True)
    stoker.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)


def test_force_ends_a_task_that_does_not_listen(flags: Flags) -> None:
    @stoker.remote(max_retries=5)
    def deaf() -> None:
        flags.raise_("runs", os.getpid())
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                flags.raise_("told")

    ref = deaf.remote()
    pid = flags.wait("runs")
    stoker.cancel(ref)
    flags.wait("told")
    assert stoker.wait([ref], timeout=0.1) == ([], [ref])
    stoker.cancel(ref, force=True)
    with pytest.raises(TaskCancelledError):
        get(ref)
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")
    assert get(same.remote(1)) == 1


def test_force_does_not_hurt_others_of_the_same_class(flags: Flags) -> None:
    ref = runs(flags, sleeps)
    others = [same.remote(i) for i in range(20)]
    stoker.cancel(ref, force=True)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(others) == list(range(20))


def test_a_queued_task_never_starts(flags: Flags) -> None:
    @stoker.remote(num_cpus=4)
    def never() -> None:
        flags.note("ran")

    ref = runs(flags, sleeps, num_cpus=4)
    queued = [never.remote() for _ in range(3)]
    for one in queued:
        stoker.cancel(one)
        with pytest.raises(TaskCancelledError):
            get(one)
    stoker.cancel(ref)
    assert stoker.wait([ref], timeout=40)[0]
    assert get(same.options(num_cpus=4).remote(1)) == 1
    assert flags.notes("ran") == []


def test_a_task_that_waits_for_arguments_never_starts(flags: Flags) -> None:
    ref = runs(flags, lambda: flags.wait("go") and None)
    dependent = same.remote(ref)
    stoker.cancel(dependent)
    with pytest.raises(TaskCancelledError):
        get(dependent)
    flags.raise_("go")
    assert get(ref) == "done"


def test_dependants_of_a_cancelled_task_fail_with_its_error(flags: Flags) -> None:
    ref = runs(flags, sleeps)
    dependent = same.remote(ref)
    stoker.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(dependent)


def test_cancel_of_a_finished_task_changes_nothing() -> None:
    ref = same.remote(1)
    assert get(ref) == 1
    stoker.cancel(ref)
    stoker.cancel(ref, force=True)
    assert get(ref) == 1
    assert get(same.remote(2)) == 2


def test_cancel_right_after_submit_ends_either_way() -> None:
    refs = [same.remote(i) for i in range(200)]
    for ref in refs:
        stoker.cancel(ref)
    ready, _ = stoker.wait(refs, num_returns=200, timeout=WAIT_S)
    assert len(ready) == 200
    assert get([same.remote(i) for i in range(50)]) == list(range(50))


def test_recursive_cancel_stops_children_and_the_other_kind_leaves_them(flags: Flags) -> None:
    @stoker.remote
    def child(name: str) -> str:
        flags.raise_(name)
        flags.wait("go")
        return name

    @stoker.remote
    def parent(name: str) -> Any:
        ref = child.remote(name)
        flags.wait(name)
        flags.raise_(f"parent-{name}")
        return stoker.get(ref)

    for name, recursive in (("stopped", True), ("left", False)):
        ref = parent.remote(name)
        flags.wait(f"parent-{name}")
        stoker.cancel(ref, recursive=recursive)
        with pytest.raises(TaskCancelledError):
            get(ref)
    until(lambda: stoker.available_resources()["CPU"] == 3, 40, "one child is left")
    flags.raise_("go")


def test_cancel_of_what_no_task_makes_is_refused() -> None:
    with pytest.raises(BadRequestError, match="was put"):
        stoker.cancel(stoker.put(1))


def test_a_borrowers_cancel_reaches_the_owner(flags: Flags) -> None:
    @stoker.remote(num_cpus=0)
    def cancels(box: list[Any]) -> None:
        stoker.cancel(box[0])

    ref = runs(flags, sleeps)
    get(cancels.remote([ref]))
    with pytest.raises(TaskCancelledError):
        get(ref)


@pytest.mark.parametrize("force", [False, True])
def test_a_borrowers_cancel_reaches_an_owner_that_runs_the_task_itself(
    flags: Flags, force: bool
) -> None:
    @stoker.remote(num_cpus=4, max_retries=0)
    def child() -> None:
        flags.raise_("runs", os.getpid())
        time.sleep(60)

    @stoker.remote(num_cpus=4)
    def parent() -> tuple[int, list[Any]]:
        return os.getpid(), [child.remote()]

    pid, (ref,) = get(parent.remote())
    assert flags.wait("runs") == str(pid)  # all CPUs went to the worker that was there
    stoker.cancel(ref, force=force)
    with pytest.raises((TaskCancelledError, ObjectLostError) if force else TaskCancelledError):
        get(ref)


# -- timeout and start_deadline ----------------------------------------------------------------------


def test_timeout_ends_a_task_that_runs_too_long(flags: Flags) -> None:
    ref = runs(flags, sleeps, timeout=4)  # it has begun by then
    with pytest.raises(TaskTimeoutError, match="timeout of 4 s"):
        get(ref)


def test_the_clock_of_timeout_starts_with_the_task(flags: Flags) -> None:
    @stoker.remote(num_cpus=4, timeout=4)
    def short() -> int:
        return 1

    ref = runs(flags, lambda: flags.wait("go") and None, num_cpus=4)
    queued = short.remote()
    assert stoker.wait([queued], timeout=4.5)[0] == []
    flags.raise_("go")
    assert get([ref, queued]) == ["done", 1]


def test_timeout_ends_a_task_that_does_not_listen_with_its_worker(flags: Flags) -> None:
    @stoker.remote(timeout=4, max_retries=3)
    def deaf() -> None:
        flags.note("runs", os.getpid())
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue

    with pytest.raises(TaskTimeoutError):
        get(deaf.remote())
    (pid,) = flags.notes("runs")
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")


def test_a_task_faster_than_its_timeout_is_not_disturbed() -> None:
    fast = same.options(timeout=30)
    for _ in range(3):
        assert get([fast.remote(i) for i in range(50)]) == list(range(50))


def test_start_deadline_gives_up_a_task_that_waits_and_says_for_what(flags: Flags) -> None:
    ref = runs(flags, lambda: flags.wait("go") and None, num_cpus=4)
    late = same.options(start_deadline=0.2, num_cpus=2).remote(1)
    with pytest.raises(TaskTimeoutError, match=r"(?s)start_deadline of 0\.2 s.*2 CPU"):
        get(late)
    dependent = same.options(start_deadline=0.2).remote(ref)
    with pytest.raises(TaskTimeoutError, match="argument"):
        get(dependent)
    flags.raise_("go")
    assert get(ref) == "done"


def test_start_deadline_leaves_a_started_task_alone(flags: Flags) -> None:
    get(same.remote(1))  # its worker takes the next one at once
    ref = runs(flags, lambda: time.sleep(4.2), start_deadline=4.0)
    assert get(ref) == "done"
