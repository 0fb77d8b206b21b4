"""Death of workers and retries end to end, and what user code may do to its worker."""

from __future__ import annotations

import os
import re
import signal
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import (
    GetTimeoutError,
    OutOfMemoryError,
    TaskCancelledError,
    WorkerDiedError,
)
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os._exit(13), "13"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
    ],
    ids=["exit", "kill", "segv", "term"],
)
def test_a_worker_that_dies_is_reported_with_its_cause_and_last_words(
    end: Callable[[], None], said: str
) -> None:
    @stoker.remote(max_retries=0)
    def die() -> None:
        sys.stdout.write("my last words\n")
        sys.stdout.flush()
        end()

    with pytest.raises(WorkerDiedError) as caught:
        get(die.remote())
    text = str(caught.value)
    assert said in text
    assert "my last words" in text
    first, *evidence = text.splitlines()
    assert first.endswith(".") and evidence[0].startswith("peak memory: ")
    assert "die" in text


def test_a_task_whose_worker_dies_is_tried_again(flags: Flags) -> None:
    @stoker.remote(max_retries=2)
    def once() -> int:
        flags.note("ran")
        attempt = stoker.get_runtime_context().attempt
        if attempt < 2:
            os._exit(1)
        return attempt

    assert get(once.remote()) == 2
    assert len(flags.notes("ran")) == 3


def test_retries_run_out(flags: Flags) -> None:
    @stoker.remote(max_retries=1)
    def die() -> None:
        flags.note("ran")
        os._exit(9)

    with pytest.raises(WorkerDiedError, match="9"):
        get(die.remote())
    assert len(flags.notes("ran")) == 2


def test_others_behind_a_dying_task_are_not_hurt() -> None:
    @stoker.remote(max_retries=0)
    def work(i: int) -> int:
        if i == 20:
            os._exit(1)
        return i

    get([work.remote(i) for i in range(20)])  # short ones: from now on many are sent at once
    refs = [work.remote(i) for i in range(60)]
    with pytest.raises(WorkerDiedError):
        get(refs[20])
    assert get(refs[:20] + refs[21:]) == [*range(20), *range(21, 60)]


@pytest.mark.parametrize("kinds", [True, [ValueError], [KeyError, ValueError], ValueError])
def test_exceptions_named_by_retry_exceptions_are_retried(kinds: Any, flags: Flags) -> None:
    @stoker.remote(max_retries=2, retry_exceptions=kinds)
    def flaky() -> int:
        flags.note("ran")
        attempt = stoker.get_runtime_context().attempt
        if attempt < 2:
            raise ValueError("again")
        return attempt

    assert get(flaky.remote()) == 2
    assert len(flags.notes("ran")) == 3


def test_other_exceptions_are_not_retried(flags: Flags) -> None:
    @stoker.remote(max_retries=3, retry_exceptions=[KeyError])
    def fail() -> int:
        flags.note("ran")
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        get(fail.remote())
    assert len(flags.notes("ran")) == 1


@pytest.mark.parametrize("kind", ["task", "sync actor", "threaded actor", "async group"])
def test_retry_exceptions_that_a_worker_cannot_import_cost_only_the_retry(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        def fail(self) -> None:
            raise ValueError("of the user")

        def ping(self) -> str:
            return "here"

    class Loop:
        @stoker.method(concurrency_group="io")
        async def fail(self) -> None:
            raise ValueError("of the user")

        @stoker.method(concurrency_group="io")
        async def ping(self) -> str:
            return "here"

    ghost = types.ModuleType("ghost")
    ghost.Ghost = type("Ghost", (Exception,), {"__module__": "ghost"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    actor: Any = None
    if kind == "task":
        fail = stoker.remote(Plain.fail).options(max_retries=1, retry_exceptions=[ghost.Ghost])
        call = fail.remote(None)
    else:
        options: dict[str, Any] = {
            "threaded actor": {"max_concurrency": 2},
            "async group": {"concurrency_groups": {"io": 1}},
        }.get(kind, {"num_cpus": 0})
        actor = stoker.remote(**options)(Loop if kind == "async group" else Plain).remote()
        retry = actor.fail.options(max_task_retries=1, retry_exceptions=[ghost.Ghost])
        call = retry.remote()
    with pytest.raises(ValueError, match="of the user") as raised:
        get(call)
    assert "No module named 'ghost'" in str(raised.value)
    if actor is not None:
        assert get(actor.ping.remote()) == "here"


def test_retry_delay_waits_between_attempts(flags: Flags) -> None:
    @stoker.remote(max_retries=2, retry_exceptions=True, retry_delay=0.3)
    def fail() -> int:
        import time

        flags.note("at", time.monotonic())
        raise ValueError("again")

    with pytest.raises(ValueError, match="again"):
        get(fail.remote())
    first, second, third = map(float, flags.notes("at"))
    assert second - first >= 0.3 * 0.75
    assert third - second >= 0.6 * 0.75, "twice as long, a quarter more or less"


def test_what_waits_for_its_next_attempt_says_when_that_is(flags: Flags) -> None:
    @stoker.remote(max_retries=4, retry_exceptions=True, retry_delay=60)
    def fail() -> None:
        flags.raise_("ran")
        raise ValueError("again")

    ref = fail.remote()
    flags.wait("ran")

    def said() -> str:
        with pytest.raises(GetTimeoutError) as caught:
            stoker.get(ref, timeout=0.1)
        return str(caught.value)

    until(lambda: re.search(r"its attempt 2 of at most 5 begins in \d\d\.\d s", said()), 20, "it")
    stoker.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)


@pytest.mark.logs(r"memory=157286400")
def test_deaths_for_want_of_memory_are_counted_apart(flags: Flags) -> None:
    @stoker.remote(memory=150 << 20, max_retries=1, max_oom_retries=2)
    def hungry(times: int) -> int:
        import time

        flags.note("ran")
        attempt: int = stoker.get_runtime_context().attempt
        if attempt < times:
            taken = bytearray(os.urandom(1 << 20) * 300)
            time.sleep(30)
            del taken
        return attempt

    assert get(hungry.remote(2)) == 2
    with pytest.raises(OutOfMemoryError):
        get(hungry.remote(9))
    assert len(flags.notes("ran")) == 3 + 3
    with pytest.raises(OutOfMemoryError):
        get(hungry.options(max_retries=0, max_oom_retries=None).remote(9))
    assert len(flags.notes("ran")) == 6 + 1, "what must not run twice does not"


def test_max_calls_renews_the_worker() -> None:
    @stoker.remote(max_calls=2, num_cpus=4)
    def pid() -> int:
        return os.getpid()

    pids = [get(pid.remote()) for _ in range(6)]
    assert all(pids.count(p) <= 2 for p in pids), pids
    burst = get([pid.remote() for _ in range(6)])
    assert all(burst.count(p) <= 2 for p in burst), burst


@pytest.mark.parametrize("options", [{"max_calls": 1}, {"num_gpus": 1}], ids=["calls", "gpu"])
def test_a_worker_that_takes_no_more_calls_stays_while_others_need_what_it_owns(
    flags: Flags, options: dict[str, Any]
) -> None:
    @stoker.remote
    def inner(i: int) -> int:
        flags.wait("go")
        return i

    @stoker.remote(max_retries=0, **options)
    def outer(i: int) -> tuple[int, list[Any]]:
        return os.getpid(), [inner.remote(i), stoker.put(i)]

    results = get([outer.remote(i) for i in range(4)])
    until(lambda: stoker.available_resources().get("GPU") == 2, 40, "the devices are free")
    assert get([two[1] for _, two in results]) == [0, 1, 2, 3]
    flags.raise_("go")
    assert get([two[0] for _, two in results]) == [0, 1, 2, 3]
    pids = [pid for pid, _ in results]
    del results
    until(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), 40, "they have left")


@pytest.mark.parametrize("name", ["", "named"])
def test_an_idle_worker_stays_while_actors_that_it_made_live(
    driver: Callable[..., Any], name: str
) -> None:
    # Others hold what counts the handles of a nameless one; a named one is only its maker's own.
    script = """
        import os, time
        import stoker
        from tests.services import until
        stoker.init(num_cpus=2, log_to_driver=False)

        @stoker.remote
        class Child:
            def ping(self): return "pong"

        @stoker.remote
        def make():
            child = Child.options(name=NAME).remote() if NAME else Child.remote()
            return os.getpid(), None if NAME else child

        @stoker.remote
        def other(): return os.getpid()

        gone = lambda pid: not os.path.exists(f"/proc/{pid}")
        maker, child = stoker.get(make.remote(), timeout=40)
        child = child or stoker.get_actor(NAME)
        assert stoker.get(child.ping.remote(), timeout=40) == "pong"
        idle = stoker.get([other.options(runtime_env={"env_vars": {"A": "1"}}).remote()], timeout=40)[0]
        until(lambda: gone(idle), 40, "the idle worker is gone")
        time.sleep(1.5)
        assert not gone(maker), "the maker of an actor went"
        assert stoker.get(child.ping.remote(), timeout=40) == "pong"
        stoker.kill(child)
        del child  # the maker owns what counts its handles
        until(lambda: gone(maker), 40, "the maker leaves after its actor")
        print("fine")
    """
    done = driver(script.replace("NAME", repr(name)), STOKER_WORKER_IDLE_S="0.3")
    assert "fine" in done.stdout, done.stdout + done.stderr


def test_exit_and_fork_in_user_code_leave_no_second_worker(flags: Flags) -> None:
    @stoker.remote(max_retries=0)
    def forks() -> int:
        pid = os.fork()
        if pid == 0:
            flags.raise_("child", os.getpid())
            return 99  # the copy of the worker must not go on as a worker
        os.waitpid(pid, 0)
        return 1

    assert get(forks.remote()) == 1
    child = int(flags.wait("child"))
    until(lambda: not os.path.exists(f"/proc/{child}"), 40, "the forked child is gone")


def test_subprocesses_work() -> None:
    @stoker.remote
    def run() -> tuple[int, str]:
        import subprocess

        done = subprocess.run(["sh", "-c", "echo out; exit 3"], capture_output=True, text=True)
        return done.returncode, done.stdout

    assert get(run.remote()) == (3, "out\n")


def test_multiprocessing_with_fork_works() -> None:
    @stoker.remote
    def run() -> list[int]:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, -3])

    assert get(run.remote()) == [1, 2, 3]
