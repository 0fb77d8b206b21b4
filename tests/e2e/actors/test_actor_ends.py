"""Actors that end of their own accord: which way, what runs before, and what their callers are told."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import actor_record, caught, embedded, until_state
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=2, num_gpus=1) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


def finish_within(seconds: float, end_s: float = GET_S) -> None:
    """Have the actor that calls this wait no longer for its calls, and for all, when it ends."""
    from stoker.runtime.worker import actor_exit

    actor_exit.FINISH_S, actor_exit.END_S = seconds, end_s


def is_ending() -> bool:
    """Whether the actor that calls this starts no more calls."""
    actor = stoker.runtime.current.runtime().worker.actor
    return bool(actor.exit.begun)


def unstarted() -> bool:
    """Whether a call has come to the actor that calls this, and has not begun."""
    return bool(stoker.runtime.current.runtime().worker.calls.queued)


class Hooked:
    """Notes in a file which of its hooks ran."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.held: Any = None
        atexit.register(self.note, "atexit")

    def note(self, text: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{text}\n")

    def __stoker_shutdown__(self) -> None:
        self.note("shutdown")


class Plain(Hooked):
    """Its methods run on the main thread, or on a pool."""

    def ping(self) -> str:
        return "here"

    def leave(self) -> None:
        try:
            stoker.exit_actor()
        except Exception:
            self.note("swallowed")

    def swallow(self) -> str:
        try:
            stoker.exit_actor()
        except BaseException:
            return "not left"

    def sys_exit(self, code: Any = None) -> None:
        sys.exit(code)

    def from_thread(self) -> str:
        thread = threading.Thread(target=stoker.exit_actor)
        thread.start()
        thread.join()
        return "done"

    def stream(self) -> Iterator[int]:
        yield 1
        stoker.exit_actor()

    def slow(self) -> str:
        self.note("slow")
        time.sleep(0.3)
        return "slow"

    def until_the_end(self) -> str:
        self.note("runs")
        until(is_ending, GET_S, "the actor ends")
        return "finished"

    def hold(self, refs: list[Any]) -> None:
        self.held = refs

    def leave_with_refs(self) -> None:
        self.held = [stoker.put(b"x" * 300_000), self.held]
        stoker.exit_actor()


class Loop(Hooked):
    """Its methods are coroutines."""

    async def ping(self) -> str:
        return "here"

    async def leave(self) -> None:
        stoker.exit_actor()

    async def swallow(self) -> str:
        try:
            stoker.exit_actor()
        except BaseException:
            return "not left"

    async def sys_exit(self, code: Any = None) -> None:
        sys.exit(code)

    async def from_thread(self) -> str:
        await asyncio.to_thread(stoker.exit_actor)
        return "done"

    async def stream(self) -> AsyncIterator[int]:
        yield 1
        stoker.exit_actor()

    async def slow(self) -> str:
        self.note("slow")
        await asyncio.sleep(0.3)
        return "slow"

    async def until_the_end(self) -> str:
        self.note("runs")
        await asyncio.to_thread(until, is_ending, GET_S, "the actor ends")
        return "finished"

    async def gather(self) -> None:
        async def leave() -> None:
            await asyncio.sleep(0.01)
            finish_within(0.1)
            stoker.exit_actor()

        await asyncio.gather(leave(), asyncio.sleep(60))

    async def spawn(self) -> None:
        async def leave() -> None:
            finish_within(0.1)
            sys.exit(0)

        self.held = asyncio.get_running_loop().create_task(leave())

    async def wait(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.note("cancelled")


@pytest.fixture(params=["sync", "threaded", "async", "async groups"])
def remote(request: pytest.FixtureRequest) -> Any:
    """The same actor in each way to run."""
    kinds = {
        "sync": stoker.remote(Plain),
        "threaded": stoker.remote(max_concurrency=3)(Plain),
        "async": stoker.remote(Loop),
        "async groups": stoker.remote(concurrency_groups={"io": 2})(Loop),
    }
    return kinds[request.param]


@pytest.fixture(params=["threaded", "async groups"])
def either(request: pytest.FixtureRequest) -> Any:
    """The two ways to run that have more threads than one."""
    if request.param == "threaded":
        return stoker.remote(max_concurrency=3)(Plain)
    return stoker.remote(concurrency_groups={"io": 2})(Loop)


def told(ref: Any) -> str:
    error = caught(lambda: get(ref), exceptions.ActorDiedError)
    return str(error)


def hooks(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("how", ["leave", "sys_exit", "stream"])
def test_an_actor_ends_itself_runs_its_hooks_and_says_so(
    remote: Any, how: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    actor = remote.options(max_restarts=3).remote(str(log))
    get(actor.ping.remote())
    call = getattr(actor, how).remote()
    if how == "stream":
        assert get(next(call)) == 1
        call = next(call)
    text = told(call)
    assert "it ended itself" in text
    assert ("sys.exit()" if how == "sys_exit" else "exit_actor()") in text
    assert f".{how}" in text
    assert hooks(log) == ["shutdown", "atexit"]
    assert "it ended itself" in told(actor.ping.remote())
    record = actor_record(actor.actor_id)
    assert (record["state"], record["restarts"]) == ("DEAD", 0)


@pytest.mark.parametrize("how", ["swallow", "from_thread"])
def test_the_end_comes_even_if_the_exit_is_swallowed_or_of_another_thread(
    either: Any, how: str, tmp_path: Path
) -> None:
    actor = either.remote(str(tmp_path / "log"))
    get(actor.ping.remote())
    getattr(actor, how).remote()
    until_state(actor.actor_id, "DEAD")
    assert "exit_actor()" in told(actor.ping.remote())
    assert hooks(tmp_path / "log") == ["shutdown", "atexit"]


def test_an_exit_code_other_than_0_is_a_failure_after_which_it_restarts(
    either: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    actor = either.options(max_restarts=1).remote(str(log))
    error = caught(lambda: get(actor.sys_exit.remote(3)), exceptions.ActorUnavailableError)
    assert "sys.exit(3)" in str(error)
    assert hooks(log) == ["shutdown", "atexit"]
    assert get(actor.ping.remote()) == "here"
    error = caught(lambda: get(actor.sys_exit.remote("no disk")), exceptions.ActorDiedError)
    assert "sys.exit('no disk')" in str(error)
    assert error.extra["exit_code"] == 1
    assert actor_record(actor.actor_id)["restarts"] == 1


def test_calls_that_wait_behind_the_end_fail_with_its_reason(tmp_path: Path) -> None:
    actor = stoker.remote(Plain).remote(str(tmp_path / "log"))
    first, end = actor.slow.remote(), actor.leave.remote()
    behind = [actor.ping.remote() for _ in range(20)]
    assert get(first) == "slow"
    assert all("it ended itself" in told(ref) for ref in [end, *behind])


@pytest.mark.parametrize("how", ["gather", "spawn"])
def test_a_task_of_an_actors_loop_may_end_it(how: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = stoker.remote(Loop).remote(str(log))
    waits = actor.wait.remote()
    getattr(actor, how).remote()
    assert "it ended itself" in told(waits)
    assert hooks(log) == ["cancelled", "shutdown", "atexit"]


def test_terminate_lets_the_calls_before_it_finish(remote: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = remote.options(max_restarts=2).remote(str(log))
    before = [actor.slow.remote() for _ in range(2)]
    end = actor.__stoker_terminate__.remote()
    assert get(end) is None
    assert hooks(log) == ["slow", "slow", "shutdown", "atexit"]
    assert get(before) == ["slow", "slow"]
    assert "__stoker_terminate__" in told(actor.ping.remote())
    assert until_state(actor.actor_id, "DEAD")["restarts"] == 0


@pytest.mark.parametrize("cls", [Plain, Loop])
def test_terminate_lets_the_calls_that_queue_in_other_groups_finish(
    cls: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    actor = stoker.remote(concurrency_groups={"io": 1})(cls).remote(str(log))
    before = [actor.slow.options(concurrency_group="io").remote() for _ in range(3)]
    assert get(actor.__stoker_terminate__.remote()) is None
    assert get(before) == ["slow"] * 3
    assert hooks(log) == [*["slow"] * 3, "shutdown", "atexit"]


def test_calls_that_run_when_the_actor_ends_finish_and_those_that_wait_do_not(
    either: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    actor = either.options(max_concurrency=3).remote(str(log))
    run = [actor.until_the_end.remote() for _ in range(2)]
    until(lambda: hooks(log) == ["runs", "runs"], GET_S, "they run")
    end = actor.leave.remote()  # the third that may run: no other starts before the end has begun
    wait = [actor.slow.remote() for _ in range(6)]
    assert "exit_actor()" in told(end)
    assert get(run) == ["finished", "finished"]
    assert all("exit_actor()" in told(ref) for ref in wait)
    assert hooks(log) == ["runs", "runs", "shutdown", "atexit"]


@pytest.mark.parametrize("after", ["its group", "all groups"])
def test_a_call_that_comes_when_its_loop_is_closed_loses_no_result(
    after: str, tmp_path: Path
) -> None:
    @stoker.remote(concurrency_groups={"io": 2})
    class Late(Loop):
        async def prepare(self) -> None:
            finish_within(GET_S, 2 * GET_S)
            if after == "all groups":
                atexit.register(self.until_called)

        def until_called(self) -> str:
            until(lambda: not io_runs(), GET_S, "the group's loop is closed")
            self.note("waits")
            until(unstarted, GET_S, "a call comes")
            return "finished"

        async def work(self) -> str:
            return await asyncio.to_thread(self.until_called)

    def io_runs() -> bool:
        return any(thread.name == "stoker-actor-io" for thread in threading.enumerate())

    log = tmp_path / "log"
    late = Late.remote(str(log))
    get(late.prepare.remote())
    if after == "its group":
        promised, expected = late.work.remote(), "finished"
        late.leave.remote()
        ping = late.ping.options(concurrency_group="io")
    else:
        promised, expected, ping = late.__stoker_terminate__.remote(), None, late.ping
    until(lambda: "waits" in hooks(log), GET_S, "the loop is closed")
    call = ping.remote()
    assert get(promised) == expected
    assert "it ended itself" in told(call)
    assert sorted(hooks(log)) == ["atexit", "shutdown", "waits"]


def test_groups_that_do_not_finish_are_waited_for_together(tmp_path: Path) -> None:
    names = [f"g{number}" for number in range(40)]

    @stoker.remote(concurrency_groups=dict.fromkeys(names, 1))
    class Blocked(Loop):
        async def block(self) -> None:
            threading.Event().wait()

        async def leave(self) -> None:
            from stoker.runtime.worker import actor

            actor._JOIN_S = 0.5  # one after the other they would take 20 s
            finish_within(0, 15)
            running = stoker.runtime.current.runtime().worker.calls.running
            await asyncio.to_thread(until, lambda: len(running) > len(names), GET_S, "all run")
            stoker.exit_actor()

    log = tmp_path / "log"
    blocked = Blocked.remote(str(log))
    calls = [blocked.block.options(concurrency_group=name).remote() for name in names]
    for ref in (blocked.leave.remote(), *calls):
        assert "exit_actor()" in told(ref)
    assert hooks(log) == ["shutdown", "atexit"]


@pytest.mark.parametrize("cls", [Plain, Loop])
def test_an_actor_that_can_run_no_more_calls_ends_and_may_restart(
    cls: type, tmp_path: Path
) -> None:
    def sabotage(instance: Any) -> None:
        from stoker.runtime.worker.invoke import Invoker

        def defect(*args: Any) -> None:
            raise RuntimeError("a defect")

        Invoker.invoke = Invoker.invoke_async = defect  # type: ignore[assignment]

    log = tmp_path / "log"
    made = stoker.remote(concurrency_groups={"io": 1}, max_restarts=1)(cls)
    actor = made.remote(str(log))
    ping = actor.ping.options(concurrency_group="io")
    get(actor.__stoker_call__.remote(sabotage))
    caught(lambda: get(ping.remote()), exceptions.ActorUnavailableError)
    assert hooks(log) == ["shutdown", "atexit"]
    assert get(ping.remote()) == "here"
    get(actor.__stoker_call__.remote(sabotage))
    assert "RuntimeError: a defect" in told(ping.remote())


def test_an_async_hook_is_awaited(tmp_path: Path) -> None:
    class Async(Hooked):
        async def __stoker_shutdown__(self) -> None:
            await asyncio.sleep(0.01)
            self.note("awaited")

        def leave(self) -> None:
            stoker.exit_actor()

    log = tmp_path / "log"
    actor = stoker.remote(Async).remote(str(log))
    told(actor.leave.remote())
    assert hooks(log) == ["awaited", "atexit"]


def test_a_hook_that_fails_does_not_hide_the_end(tmp_path: Path) -> None:
    class Broken(Plain):
        def __stoker_shutdown__(self) -> None:
            raise OSError("no disk")

    actor = stoker.remote(Broken).remote(str(tmp_path / "log"))
    assert "exit_actor()" in told(actor.leave.remote())
    assert hooks(tmp_path / "log") == ["atexit"]


def test_an_exit_in_the_constructor_is_the_end(tmp_path: Path) -> None:
    @stoker.remote(max_restarts=3)
    class Never:
        def __init__(self, code: int | None) -> None:
            if code is None:
                stoker.exit_actor()
            sys.exit(code)

        def ping(self) -> None:
            return None

    for code, shown in ((None, "exit_actor()"), (0, "sys.exit(0)"), (4, "sys.exit(4)")):
        never = Never.remote(code)
        text = told(never.ping.remote())
        assert f"it ended itself: {shown} in its constructor" in text
        assert actor_record(never.actor_id)["restarts"] == 0


def test_an_actor_that_left_gives_back_its_name_its_gpu_and_what_it_borrowed(
    tmp_path: Path,
) -> None:
    mine = stoker.put(b"y" * 300_000)
    remote = stoker.remote(Plain).options(num_gpus=1)
    actor = remote.options(name="leaver").remote(str(tmp_path / "log"))
    get(actor.hold.remote([mine]))
    assert "exit_actor()" in told(actor.leave_with_refs.remote())
    caught(lambda: stoker.get_actor("leaver"), exceptions.NotFoundError)
    second = remote.options(name="leaver").remote(str(tmp_path / "log"))
    assert get(second.ping.remote()) == "here"
    assert get(mine) == b"y" * 300_000
    stoker.kill(second)


def test_a_fork_of_an_actor_ends_alone_with_its_own_exit_code() -> None:
    class Forks:
        def fork(self, leave: Any) -> int:
            pid = os.fork()
            if pid == 0:
                leave()
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fail() -> None:
        raise OSError("in the fork")

    for threads in (1, 2):
        forks = stoker.remote(max_concurrency=threads)(Forks).remote()
        leaves = [lambda: sys.exit(5), sys.exit, fail]
        assert get([forks.fork.remote(leave) for leave in leaves]) == [5, 0, 1]
        stoker.kill(forks)


def test_hooks_that_do_not_end_hold_an_actor_up_for_a_bounded_time(tmp_path: Path) -> None:
    class Hangs(Loop):
        async def ignore(self) -> None:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.note("ignored")

        async def leave(self) -> None:
            finish_within(0.2, 1.5)
            stoker.exit_actor()

    class Sleeps(Plain):
        def __stoker_shutdown__(self) -> None:
            time.sleep(60)

        def leave(self) -> None:
            finish_within(0.2, 1.5)
            stoker.exit_actor()

    log = tmp_path / "log"
    hangs, sleeps = stoker.remote(Hangs).remote(str(log)), stoker.remote(Sleeps).remote(str(log))
    ignores = hangs.ignore.remote()
    for ref in (hangs.leave.remote(), ignores, sleeps.leave.remote()):
        assert "exit_actor()" in told(ref)
    assert hooks(log) == ["ignored"]


def test_an_actor_without_handles_runs_its_hooks(remote: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = remote.options(max_restarts=3).remote(str(log))
    actor_id = actor.actor_id
    get(actor.ping.remote())
    slow = actor.slow.remote()
    del actor
    record = until_state(actor_id, "DEAD")
    assert get(slow) == "slow"
    assert "no handle to it is left" in record["death_cause"]["message"]
    assert record["restarts"] == 0
    assert hooks(log) == ["slow", "shutdown", "atexit"]


def test_an_actor_that_only_others_called_runs_its_hooks_without_handles(tmp_path: Path) -> None:
    @stoker.remote(num_cpus=0)
    def use(actor: Any) -> Any:
        return stoker.get(actor.ping.remote())

    log = tmp_path / "log"
    actor = stoker.remote(Plain).remote(str(log))
    actor_id = actor.actor_id
    assert get(use.remote(actor)) == "here"
    del actor
    record = until_state(actor_id, "DEAD")
    assert "no handle to it is left" in record["death_cause"]["message"]
    assert hooks(log) == ["shutdown", "atexit"]


def test_kill_runs_no_hook(tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = stoker.remote(Plain).remote(str(log))
    get(actor.ping.remote())
    stoker.kill(actor)
    told(actor.ping.remote())
    assert hooks(log) == []


def test_exit_actor_outside_of_actors_is_an_error_that_says_so() -> None:
    @stoker.remote(num_cpus=0)
    def task() -> None:
        stoker.exit_actor()

    for attempt in (stoker.exit_actor, lambda: get(task.remote())):
        error = caught(attempt, exceptions.BadRequestError)
        assert "runs in no actor" in str(error)


def test_the_results_of_calls_before_the_end_arrive(tmp_path: Path) -> None:
    @stoker.remote
    class Big:
        def make(self, count: int) -> list[Any]:
            return [b"z" * 200_000, stoker.put(count)]

        def leave(self) -> None:
            stoker.exit_actor()

    big = Big.remote()
    refs = [big.make.remote(i) for i in range(20)]
    assert "exit_actor()" in told(big.leave.remote())
    assert [len(value[0]) for value in get(refs)] == [200_000] * 20
    until(lambda: stoker.available_resources() == stoker.cluster_resources(), GET_S, "all is back")
