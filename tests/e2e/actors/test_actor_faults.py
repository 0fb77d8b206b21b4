"""What becomes of actors whose process, constructor or memory fails, and what their callers are told."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import actor_record, caught, embedded, until_state, waits_for
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GET_S = 40.0
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=2, num_gpus=2) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


@stoker.remote
class Mortal:
    """Can be made to die in many ways."""

    def __init__(self, note: str = "") -> None:
        self.count = 0
        self.note = note

    def add(self) -> int:
        self.count += 1
        return self.count

    def read(self) -> str:
        return self.note

    def pid(self) -> int:
        return os.getpid()

    def leave(self, code: int, last_words: str = "") -> None:
        if last_words:
            sys.stdout.write(f"{last_words}\n")
            sys.stdout.flush()
        os._exit(code)

    def shot(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "waited"

    def once(self, path: str) -> str:
        """Die at the first call, by a file that both lives share."""
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(9)
        return "second life"

    def reborn(self) -> bool:
        return stoker.get_runtime_context().was_current_actor_reconstructed


def test_a_constructor_that_raises_is_the_cause_of_death_with_its_traceback() -> None:
    @stoker.remote
    class Broken:
        def __init__(self) -> None:
            self._load()

        def _load(self) -> None:
            raise FileNotFoundError("weights.bin is not there")

        def work(self) -> None:
            return None

    broken = Broken.remote()
    error = caught(lambda: get(broken.work.remote()), exceptions.ActorDiedError)
    text = str(error)
    assert "FileNotFoundError: weights.bin is not there" in text
    assert "in _load" in text
    assert "Broken" in text
    record = until_state(broken.actor_id, "DEAD")
    assert "weights.bin" in record["death_cause"]["message"]
    assert isinstance(caught(lambda: get(broken.work.remote())), exceptions.ActorDiedError)


def test_a_constructor_that_raises_is_not_tried_again() -> None:
    @stoker.remote(max_restarts=5)
    class Broken:
        def __init__(self) -> None:
            raise ValueError("always")

        def work(self) -> None:
            return None

    broken = Broken.remote()
    assert "always" in str(caught(lambda: get(broken.work.remote()), exceptions.ActorDiedError))
    assert actor_record(broken.actor_id)["restarts"] == 0


def test_calls_sent_to_a_process_that_dies_in_its_constructor_run_in_the_next(
    tmp_path: Path,
) -> None:
    """They have run nowhere: neither are they lost, nor does it take a retry."""
    ran = tmp_path / "ran"

    @stoker.remote(max_restarts=3)
    class Fragile:
        def __init__(self) -> None:
            life = len(list(tmp_path.glob("life-*")))
            (tmp_path / f"life-{life}").touch()
            if life < 3:
                until((tmp_path / f"end-{life}").exists, GET_S, "the driver has sent its calls")
                os.kill(os.getpid(), signal.SIGKILL)

        def add(self, number: int) -> int:
            with ran.open("a") as file:
                file.write(f"{number}\n")
            return number

    fragile = Fragile.remote()
    refs = [fragile.add.remote(i) for i in range(20)]
    for life in range(3):
        sent = functools.partial(at_worker, refs[-1], tmp_path, life)
        until(sent, GET_S, f"life {life} has the calls")
        (tmp_path / f"end-{life}").touch()
    assert get(refs) == list(range(20))
    assert ran.read_text().split() == [str(i) for i in range(20)]
    assert actor_record(fragile.actor_id)["restarts"] == 3


@pytest.mark.logs("lease did not start")  # a process may end before its lease is granted
def test_calls_outlive_a_constructor_that_crashes_again_and_again(tmp_path: Path) -> None:
    """However many processes end between two looks of the caller."""

    @stoker.remote(max_restarts=-1)
    class Fragile:
        def __init__(self) -> None:
            life = len(list(tmp_path.glob("life-*")))
            (tmp_path / f"life-{life}").touch()
            if life < 6:
                os._exit(1)

        def add(self, number: int) -> int:
            return number

    fragile = Fragile.remote()
    assert get([fragile.add.remote(i) for i in range(20)]) == list(range(20))


def test_an_actor_without_handles_is_not_asked_to_end_while_its_constructor_runs() -> None:
    @stoker.remote
    class Stuck:
        def __init__(self) -> None:
            time.sleep(2 * GET_S)

        def work(self) -> None:
            return None

    stuck = Stuck.remote()
    actor_id, ref = stuck.actor_id, stuck.work.remote()
    until(lambda: "has not returned" in waits_for(ref), GET_S, "its constructor runs")
    stoker.cancel(ref)
    assert isinstance(caught(lambda: get(ref)), exceptions.TaskCancelledError)
    del stuck
    until_state(actor_id, "DEAD", 25.0)  # the time that it would have to end by itself is longer


def at_worker(ref: Any, folder: Path, life: int) -> bool:
    begun = (folder / f"life-{life}").exists()
    return begun and "its constructor has not returned" in waits_for(ref)


def test_a_call_may_be_cancelled_while_the_constructor_runs(tmp_path: Path) -> None:
    go = tmp_path / "go"

    @stoker.remote
    class Slow:
        def __init__(self) -> None:
            until(go.exists, GET_S, "the driver has cancelled a call")
            self.heard: list[int] = []

        def say(self, number: int) -> list[int]:
            self.heard.append(number)
            return self.heard

    slow = Slow.remote()
    refs = [slow.say.remote(i) for i in range(3)]
    until(lambda: "has not returned" in waits_for(refs[2]), GET_S, "they are at the worker")
    stoker.cancel(refs[1])
    assert isinstance(caught(lambda: get(refs[1])), exceptions.TaskCancelledError)
    go.touch()
    assert get(refs[2]) == [0, 2]


@pytest.mark.parametrize(
    ("method", "argument", "expected"),
    [("leave", 3, "code 3"), ("shot", signal.SIGSEGV, "SIGSEGV"), ("shot", 9, "SIGKILL")],
)
def test_the_death_of_the_process_is_told_with_how_it_ended(
    method: str, argument: int, expected: str
) -> None:
    mortal = Mortal.remote()
    ref = getattr(mortal, method).remote(int(argument))
    behind = mortal.add.remote()
    error = caught(lambda: get(ref), exceptions.ActorDiedError)
    assert expected in str(error)
    assert isinstance(caught(lambda: get(behind)), exceptions.ActorDiedError)
    if method == "leave":
        assert error.extra["exit_code"] == 3
    else:
        assert error.extra["signal"] == argument


def test_the_last_words_of_an_actor_are_in_the_error() -> None:
    mortal = Mortal.remote()
    error = caught(lambda: get(mortal.leave.remote(1, "the disk is on fire")))
    assert isinstance(error, exceptions.ActorDiedError)
    assert "the disk is on fire" in str(error)


@pytest.mark.logs(r"exceeded memory=")
def test_an_actor_that_uses_more_memory_than_it_asked_for_dies_of_that() -> None:
    @stoker.remote(memory=150 * MIB)
    class Hungry:
        def eat(self) -> int:
            self.food = [bytearray(os.urandom(MIB)) for _ in range(400)]
            time.sleep(60)
            return len(self.food)

    hungry = Hungry.remote()
    error = caught(lambda: get(hungry.eat.remote()), exceptions.ActorDiedError)
    assert "memory" in str(error)
    assert error.extra["oom"] is True
    hungry = Hungry.options(max_restarts=1).remote()
    error = caught(lambda: get(hungry.eat.remote()), exceptions.ActorUnavailableError)
    assert "was out of memory and ended while it had the call" in str(error).splitlines()[0]
    assert "memory=" in str(error)
    assert error.extra["oom"] is True


@pytest.mark.logs(r"exceeded memory=")
def test_deaths_of_an_actor_for_want_of_memory_are_counted_apart(tmp_path: Path) -> None:
    lives = tmp_path / "lives"

    @stoker.remote(memory=150 * MIB, max_restarts=1, max_oom_restarts=2)
    class Hungry:
        def __init__(self) -> None:
            with lives.open("a") as file:
                file.write("born\n")

        @stoker.method(max_task_retries=1, max_oom_retries=2)
        def eat(self, lives_on_from: int) -> int:
            life = len(lives.read_text().splitlines())
            if life < lives_on_from:
                food = [bytearray(os.urandom(MIB)) for _ in range(400)]
                time.sleep(60)
                del food
            return life

        @stoker.method(max_task_retries=1)
        def crash_before(self, lives_on_from: int) -> int:
            life = len(lives.read_text().splitlines())
            if life < lives_on_from:
                os._exit(9)
            return life

    hungry: Any = Hungry.remote()
    assert get(hungry.eat.remote(3)) == 3, "both deaths are of its max_oom_restarts"
    assert get(hungry.crash_before.remote(4)) == 4, "it has all of its max_restarts left"
    record = actor_record(hungry.actor_id)
    assert (record["restarts"], record["oom_restarts"]) == (3, 2)
    error = caught(lambda: get(hungry.eat.remote(9)), exceptions.ActorDiedError)
    assert error.extra["oom"] is True


def test_a_restarted_actor_has_lost_its_state_and_kept_its_arguments() -> None:
    large = stoker.put("n" * 300_000)
    mortal = Mortal.options(max_restarts=1).remote(large)
    del large
    assert get([mortal.add.remote(), mortal.add.remote()]) == [1, 2]
    assert get(mortal.reborn.remote()) is False
    pid = get(mortal.pid.remote())
    died = mortal.leave.remote(1)
    assert isinstance(caught(lambda: get(died)), exceptions.ActorUnavailableError)
    assert get(mortal.add.remote()) == 1
    assert get(mortal.pid.remote()) != pid
    assert len(get(mortal.read.remote())) == 300_000
    assert get(mortal.reborn.remote()) is True
    record = actor_record(mortal.actor_id)
    assert (record["restarts"], record["state"]) == (1, "ALIVE")
    assert isinstance(caught(lambda: get(mortal.leave.remote(1))), exceptions.ActorDiedError)


def test_calls_behind_the_one_that_killed_it_fail_or_run_but_never_hang() -> None:
    mortal = Mortal.options(max_restarts=1).remote()
    get(mortal.add.remote())
    refs = [mortal.leave.remote(1), *(mortal.add.remote() for _ in range(50))]
    ready, rest = stoker.wait(refs, num_returns=len(refs), timeout=GET_S)
    assert rest == []
    assert len(ready) == 51
    assert isinstance(caught(lambda: get(refs[0])), exceptions.ActorUnavailableError)
    assert get(mortal.add.remote()) >= 1


def test_max_task_retries_tries_a_call_again_in_the_next_life(tmp_path: Path) -> None:
    mortal = Mortal.options(max_restarts=2, max_task_retries=1).remote()
    ref = mortal.once.remote(str(tmp_path / "died"))
    after = [mortal.add.remote() for _ in range(5)]
    assert get(ref) == "second life"
    assert get(after) == [1, 2, 3, 4, 5]


def test_retries_of_a_method_can_be_set_at_the_call(tmp_path: Path) -> None:
    mortal = Mortal.options(max_restarts=1).remote()
    ref = mortal.once.options(max_task_retries=1).remote(str(tmp_path / "died"))
    assert get(ref) == "second life"


def test_exceptions_that_a_method_asks_to_retry_are_tried_again() -> None:
    @stoker.remote
    class Flaky:
        def __init__(self) -> None:
            self.tries = 0

        def work(self) -> int:
            self.tries += 1
            if self.tries < 3:
                raise ConnectionError("not yet")
            return self.tries

    flaky = Flaky.remote()
    work = flaky.work.options(max_task_retries=5, retry_exceptions=[ConnectionError])
    assert get(work.remote()) == 3


def test_a_call_that_raised_pauses_before_its_retry_while_others_go_on() -> None:
    @stoker.remote
    class Flaky:
        def __init__(self) -> None:
            self.at: list[float] = []

        def work(self) -> list[float]:
            self.at.append(time.monotonic())
            if len(self.at) < 3:
                raise ConnectionError("not yet")
            return self.at

        def ping(self) -> int:
            return len(self.at)

    flaky = Flaky.remote()
    again = flaky.work.options(max_task_retries=5, retry_exceptions=True, retry_delay=0.4)
    ref = again.remote()
    until(lambda: get(flaky.ping.remote()) == 1, GET_S, "it ran once")
    first, second, third = get(ref)
    assert second - first >= 0.4 * 0.75
    assert third - second >= 0.8 * 0.75
    slow = flaky.work.options(max_task_retries=-1, retry_exceptions=True, retry_delay=60)
    get(flaky.__stoker_call__.remote(lambda self: self.at.clear()))
    waiting, doomed = slow.remote(), slow.remote()
    until(lambda: get(flaky.ping.remote()) == 2, GET_S, "both ran once")
    stoker.cancel(waiting)
    assert isinstance(caught(lambda: get(waiting)), exceptions.TaskCancelledError)
    stoker.kill(flaky)
    assert isinstance(caught(lambda: get(doomed)), exceptions.ActorDiedError)


def test_a_restart_pauses_and_says_so() -> None:
    mortal = Mortal.options(max_restarts=1, restart_delay=60).remote()
    get(mortal.pid.remote())
    stoker.kill(mortal, no_restart=False)

    def pauses() -> bool:
        record = actor_record(mortal._info.actor_id)
        reason: str = record["pending_reason"]
        return record["state"] == "RESTARTING" and reason.startswith("restarts after a pause")

    until(pauses, GET_S, "it says why it waits")
    waiting = mortal.pid.remote()
    stoker.kill(mortal)
    assert isinstance(caught(lambda: get(waiting)), exceptions.ActorDiedError)


def test_kill_with_restart_brings_it_back_and_kill_without_does_not() -> None:
    mortal = Mortal.options(max_restarts=-1).remote()
    pids = {get(mortal.pid.remote())}
    for _ in range(2):
        stoker.kill(mortal, no_restart=False)
        pid = until(lambda: _new_pid(mortal, pids), GET_S, "it lives again")
        pids.add(pid)
    stoker.kill(mortal)
    assert isinstance(caught(lambda: get(mortal.pid.remote())), exceptions.ActorDiedError)


def _new_pid(actor: Any, old: set[int]) -> int:
    try:
        pid: int = get(actor.pid.remote())
    except exceptions.ActorUnavailableError:
        return 0
    return 0 if pid in old else pid


def test_an_actor_killed_from_outside_is_noticed_without_a_call() -> None:
    mortal = Mortal.remote()
    os.kill(get(mortal.pid.remote()), signal.SIGKILL)
    record = until_state(mortal.actor_id, "DEAD")
    assert "SIGKILL" in record["death_cause"]["message"]


def test_a_caller_in_a_task_learns_of_the_death_as_well() -> None:
    @stoker.remote(num_cpus=0)
    def call(actor: Any) -> str:
        try:
            stoker.get(actor.leave.remote(5))
        except exceptions.ActorDiedError as error:
            return str(error)
        return ""

    assert "code 5" in get(call.remote(Mortal.remote()))


def test_a_dead_actor_gives_its_gpu_and_its_name_back() -> None:
    first = Mortal.options(num_gpus=2, name="holder").remote()
    get(first.add.remote())
    caught(lambda: get(first.leave.remote(1)))
    second = Mortal.options(num_gpus=2, name="holder").remote()
    assert get(second.add.remote()) == 1
    stoker.kill(second)
    until(lambda: stoker.available_resources()["GPU"] == 2.0, 40, "both GPUs are free")


def test_objects_of_a_dead_actor_are_lost_with_a_clear_error() -> None:
    @stoker.remote
    class Owner:
        def put(self) -> list[Any]:
            return [stoker.put(b"x" * 200_000)]

        def pid(self) -> int:
            return os.getpid()

    owner = Owner.remote()
    (ref,) = get(owner.put.remote())
    pid = get(owner.pid.remote())
    stoker.kill(owner)
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its process is gone")

    def read() -> BaseException | None:
        """What it owns goes when its nodelet buries it, a moment later."""
        try:
            get(ref)
        except exceptions.ObjectLostError as error:
            return error
        return None

    error = until(read, 40, "what it owned is lost")
    assert ref.id in str(error)


HUNDRED = """
import json, psutil, time, stoker

@stoker.remote
class Light:
    def add(self):
        return 1

    def facts(self):
        me = psutil.Process()
        return me.num_fds(), me.num_threads()

stoker.init(num_cpus=1, num_gpus=0)
me = psutil.Process()
before = me.num_fds(), me.num_threads()
began = time.monotonic()
actors = [Light.remote() for _ in range(100)]
assert stoker.get([a.add.remote() for a in actors], timeout=50) == [1] * 100
facts = {"start_s": time.monotonic() - began, "driver_fds": me.num_fds() - before[0],
         "driver_threads": me.num_threads() - before[1]}
began = time.monotonic()
for _ in range(5):
    stoker.get([a.add.remote() for a in actors], timeout=50)
facts["500_calls_s"] = time.monotonic() - began
facts["actor_fds"], facts["actor_threads"] = stoker.get(actors[0].facts.remote())
del actors
began = time.monotonic()
while stoker.api.calls.list_all("/v1/actors", state="ALIVE"):
    assert time.monotonic() - began < 60, "they end with their handles"
facts["end_s"] = time.monotonic() - began
print("FACTS", json.dumps(facts))
"""


def test_a_hundred_actors_without_cpus_are_light(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNDRED],
        env={**os.environ, "STOKER_SESSION_ROOT": str(tmp_path / "s"), "STOKER_LOG_TO_DRIVER": "0"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [x for x in ended.stdout.splitlines() if x.startswith("FACTS ")]
    facts = json.loads(line.removeprefix("FACTS "))
    sys.stdout.write(f"100 actors: {facts}\n")
    # A connection to each, and those to the gcs that are kept for reuse.
    assert facts["driver_fds"] <= 130
    assert facts["driver_threads"] <= 2
    assert facts["actor_fds"] <= 32
    assert facts["actor_threads"] <= 8


def test_hundreds_of_actors_that_wait_do_not_keep_others_from_the_gcs() -> None:
    """Each wait once took a connection: beyond their limit, nothing else got through."""
    waiting = [Mortal.options(num_gpus=2).remote() for _ in range(300)]
    refs = [actor.add.remote() for actor in waiting]
    light = Mortal.remote()
    assert get(light.add.remote()) == 1
    stoker.kill(light)
    for actor in waiting:
        stoker.kill(actor)
    done, rest = stoker.wait(refs, num_returns=len(refs), timeout=GET_S)
    assert (len(done), rest) == (300, [])
