"""Fate sharing: what becomes of actors when the process that created them ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import actor_record, caught, embedded, head, run_driver, until_state
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=4, num_gpus=0) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


@stoker.remote(num_cpus=0)
def never(path: str) -> int:
    """Return once the file is there."""
    until(lambda: os.path.exists(path), 4 * GET_S, f"{path} is made")
    return 1


@stoker.remote
class Child:
    """Has a CPU or a part of one."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def pid(self) -> int:
        return os.getpid()

    def get(self) -> int:
        return self.value


@stoker.remote
class Parent:
    """Makes actors, and ends in many ways."""

    def start(self, cls: Any, **options: Any) -> str:
        self.child = cls.options(**options).remote()
        stoker.get(self.child.pid.remote())
        return str(self.child.actor_id)

    def nest(self, cls: Any, leaf: Any) -> tuple[str, str]:
        self.child = cls.remote()
        return self.child.actor_id, stoker.get(self.child.start.remote(leaf))

    def make_waiting(self, cls: Any, path: str) -> Any:
        self.waiting = cls.remote(never.remote(path))
        return self.waiting

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        os._exit(3)


def dead_of_its_owner(actor_id: str, owner: str) -> str:
    """Wait for the actor's end, check its cause, return that."""
    text = str(until_state(actor_id, "DEAD")["death_cause"]["message"])
    assert text.startswith(f"its owner, {owner}")
    return text


@pytest.mark.parametrize("how", ["kill", "drop", "exit", "signal"])
def test_an_actor_ends_with_the_actor_that_created_it(how: str) -> None:
    parent: Any = Parent.remote()
    owner = f"actor Parent {parent.actor_id}, died: "
    actor_id = get(parent.start.remote(Child, num_cpus=1))
    pid = actor_record(actor_id)["pid"]
    match how:
        case "kill":
            stoker.kill(parent)
        case "drop":
            del parent
        case "exit":
            parent.leave.remote()
        case "signal":
            os.kill(get(parent.pid.remote()), signal.SIGKILL)
    text = dead_of_its_owner(actor_id, owner)
    assert {
        "kill": "killed by stoker.kill()",
        "drop": "no handle",
        "exit": "exited with code 3",
        "signal": "SIGKILL",
    }[how] in text
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")
    until(lambda: stoker.available_resources()["CPU"] == 4, 40, "its CPU is free")


def test_what_an_actor_left_behind_before_its_restart_ends() -> None:
    parent = Parent.options(max_restarts=1).remote()
    first = get(parent.start.remote(Child))
    parent.leave.remote()
    dead_of_its_owner(first, f"actor Parent {parent.actor_id}")
    second = get(parent.start.options(max_task_retries=3).remote(Child))
    assert actor_record(second)["state"] == "ALIVE"
    stoker.kill(parent)
    dead_of_its_owner(second, f"actor Parent {parent.actor_id}")


def test_grandchildren_end_too() -> None:
    parent = Parent.remote()
    child, grandchild = get(parent.nest.remote(Parent, Child))
    stoker.kill(parent)
    dead_of_its_owner(child, f"actor Parent {parent.actor_id}")
    dead_of_its_owner(grandchild, f"actor Parent {child}")


def test_named_actors_end_with_their_owner_and_detached_ones_do_not() -> None:
    parent = Parent.remote()
    named = get(parent.start.remote(Child, name="of-parent"))
    detached = get(parent.start.remote(Child, name="of-nobody", lifetime="detached"))
    stoker.kill(parent)
    dead_of_its_owner(named, f"actor Parent {parent.actor_id}")
    assert actor_record(detached)["state"] == "ALIVE"
    assert get(stoker.get_actor("of-nobody").get.remote()) == 0
    stoker.kill(stoker.get_actor("of-nobody"))


def test_an_actor_ends_with_the_worker_of_the_task_that_created_it(tmp_path: Path) -> None:
    @stoker.remote(max_retries=0)
    def make(cls: Any, path: str) -> None:
        actor = cls.options(name="of-task").remote()
        stoker.get(actor.pid.remote())
        until(lambda: os.path.exists(path), GET_S, f"{path} is made")
        os._exit(4)

    made = make.remote(Child, str(tmp_path / "go"))

    def found() -> Any:
        try:
            return stoker.get_actor("of-task")
        except exceptions.NotFoundError:
            return None

    actor: Any = until(found, GET_S, "the actor is there")
    pid = get(actor.pid.remote())
    (tmp_path / "go").touch()
    caught(lambda: get(made), exceptions.WorkerDiedError)
    dead_of_its_owner(actor.actor_id, "worker w_")
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40, "its worker is gone")
    error = caught(lambda: get(actor.get.remote()), exceptions.ActorDiedError)
    assert "its owner, worker w_" in str(error)


def test_calls_of_an_actor_whose_owner_died_before_its_arguments_were_there(
    tmp_path: Path,
) -> None:
    parent = Parent.remote()
    actor = get(parent.make_waiting.remote(Child, str(tmp_path / "never")))
    ref = actor.get.remote()

    def said() -> bool:
        error = caught(lambda: get(ref, 0.1), exceptions.GetTimeoutError)
        return "its constructor's arguments are not there yet" in str(error)

    until(said, GET_S, "the gcs has told what the actor waits for")
    parent.leave.remote()
    error = caught(lambda: get(ref), exceptions.ActorDiedError)
    assert f"its owner, actor Parent {parent.actor_id}, died" in str(error)
    error = caught(lambda: get(actor.get.remote()), exceptions.ActorDiedError)
    assert "its owner" in str(error)


def test_a_named_actor_is_there_before_its_arguments_are(tmp_path: Path) -> None:
    actor = Child.options(name="waits").remote(never.remote(str(tmp_path / "go")))
    again = Child.options(name="waits", get_if_exists=True).remote(7)
    assert again == actor
    ref = again.get.remote()
    error = caught(lambda: get(ref, 0.3), exceptions.GetTimeoutError)
    assert "whose constructor waits for" in str(error)
    assert "never (t_" in str(error)
    (tmp_path / "go").touch()
    assert get(ref) == 1
    stoker.kill(actor)


@pytest.mark.parametrize("before", [False, True])
def test_an_actor_whose_argument_fails_is_dead_for_all(before: bool) -> None:
    @stoker.remote(num_cpus=0)
    def fails() -> int:
        raise ValueError("no argument")

    @stoker.remote(num_cpus=0)
    def call(actor: Any) -> int:
        value: int = stoker.get(actor.get.remote())
        return value

    argument = fails.remote()
    if before:
        stoker.wait([argument])
    actor = Child.remote(argument)
    there = call.remote(actor)
    caught(lambda: get(actor.get.remote()), ValueError)
    assert "an argument of actor Child failed" in str(
        caught(lambda: get(there), exceptions.ActorDiedError)
    )


def test_a_kill_that_permits_restarts_counts_before_the_actor_is_up(tmp_path: Path) -> None:
    blockers = [Child.options(num_cpus=1).remote() for _ in range(4)]
    get([b.pid.remote() for b in blockers])
    for arguments in ((), (never.remote(str(tmp_path / "go")),)):
        actor = Child.options(max_restarts=1, num_cpus=1).remote(*arguments)
        ref = actor.get.remote()
        until_known(actor.actor_id)
        stoker.kill(actor, no_restart=False)
        record = actor_record(actor.actor_id)
        assert (record["state"], record["restarts"]) == ("RESTARTING", 1)
        stoker.kill(actor, no_restart=False)
        assert actor_record(actor.actor_id)["state"] == "DEAD"
        assert isinstance(caught(lambda ref=ref: get(ref)), exceptions.ActorDiedError)
    again = Child.options(max_restarts=1, num_cpus=1).remote(never.remote(str(tmp_path / "go")))
    stoker.kill(again, no_restart=False)
    for blocker in blockers:
        stoker.kill(blocker)
    (tmp_path / "go").touch()
    assert get(again.get.remote()) == 1


def until_known(actor_id: str) -> None:
    """Wait until the gcs has the actor."""

    def known() -> bool:
        try:
            return bool(actor_record(actor_id))
        except exceptions.NotFoundError:
            return False

    until(known, GET_S, f"the gcs knows {actor_id}")


def test_kills_of_starting_actors_print_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    program = """
        import time, stoker

        @stoker.remote
        class Slow:
            def __init__(self): time.sleep(0.02)

        @stoker.remote
        class AsyncSlow:
            def __init__(self): time.sleep(0.02)
            async def none(self): pass

        @stoker.remote
        def say(): print("the end", flush=True)

        stoker.init()
        for i in range(40):
            actor = (Slow, AsyncSlow)[i % 2].remote()
            time.sleep(0.005 * (i % 10))
            stoker.kill(actor)
        stoker.get(say.remote())
        time.sleep(1)  # what workers print comes when it comes
    """
    with head(tmp_path_factory.mktemp("b"), num_cpus=2) as other:
        done = run_driver(other, program)
    assert done.returncode == 0, done.stderr
    assert "the end" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "FencedError" not in done.stdout + done.stderr
