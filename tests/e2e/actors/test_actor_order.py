"""In which order calls of an actor start, what holds them up, and what an explanation says of that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.e2e._cluster import caught, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GET_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("a"), num_cpus=3, num_gpus=0) as info:
        yield info


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


@stoker.remote(num_cpus=0)
def later(path: str) -> int:
    """Return once the file is there."""
    until(lambda: os.path.exists(path), GET_S, f"{path} is made")
    return 1


@stoker.remote
class Fails:
    """Fails the first attempts."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.began: list[str] = []

    @stoker.method(max_task_retries=3, retry_exceptions=[ValueError])
    def one(self) -> int:
        self.began.append("one")
        self.left -= 1
        if self.left >= 0:
            raise ValueError("not yet")
        return 1

    @stoker.method(max_task_retries=3, retry_exceptions=[ValueError])
    def more(self, number: int) -> int:
        self.began.append("more")
        self.left -= 1
        if self.left >= 0:
            raise ValueError("not yet")
        return number + 1

    def log(self) -> list[str]:
        return self.began


def test_a_call_may_take_what_an_earlier_call_makes_at_its_second_attempt() -> None:
    actor = Fails.remote(1)
    assert get(actor.more.remote(actor.one.remote())) == 2


def test_calls_that_take_the_result_of_one_that_fails_overtake_nobody(tmp_path: Path) -> None:
    @stoker.remote(num_cpus=0)
    def fails(path: str) -> int:
        until(lambda: os.path.exists(path), GET_S, f"{path} is made")
        raise ValueError("no argument")

    @stoker.remote
    class Notes:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def note(self, number: int) -> list[int]:
            self.seen.append(number)
            return self.seen

    notes = Notes.remote()
    get(notes.note.remote(0))
    first = notes.note.remote(fails.remote(str(tmp_path / "go")))
    notes.note.remote(2)
    third = notes.note.remote(first)
    fourth = notes.note.remote(4)
    (tmp_path / "go").touch()
    assert get(fourth) == [0, 2, 4]
    for ref in (first, third):
        caught(lambda ref=ref: get(ref), ValueError)


def test_a_chain_of_calls_each_of_which_is_tried_again() -> None:
    actor = Fails.remote(3)
    last = actor.one.remote()
    for _ in range(5):
        last = actor.more.remote(last)
    after = actor.log.remote()
    assert get(last) == 6
    assert len(get(after)) == 9


def test_calls_tried_again_by_a_restart_and_by_an_exception(tmp_path: Path) -> None:
    @stoker.remote(max_restarts=1, max_task_retries=2)
    class Mortal:
        @stoker.method(retry_exceptions=[ValueError])
        def one(self, path: str) -> int:
            if not os.path.exists(path):
                open(path, "w").close()
                os._exit(1)
            if not os.path.exists(path + "2"):
                open(path + "2", "w").close()
                raise ValueError("once more")
            return 1

        def two(self, number: int) -> int:
            return number + 1

    actor = Mortal.remote()
    first = actor.one.remote(str(tmp_path / "died"))
    second = actor.two.remote(first)
    assert get(actor.two.remote(second)) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unready_argument_holds_up_its_own_group_only(
    tmp_path: Path, asynchronous: bool
) -> None:
    class Sync:
        @stoker.method(concurrency_group="a")
        def one(self, x: int) -> int:
            return x

        @stoker.method(concurrency_group="b")
        def two(self) -> int:
            return 2

    class Async:
        @stoker.method(concurrency_group="a")
        async def one(self, x: int) -> int:
            return x

        @stoker.method(concurrency_group="b")
        async def two(self) -> int:
            return 2

    cls: Any = Async if asynchronous else Sync
    actor = stoker.remote(concurrency_groups={"a": 1, "b": 1})(cls).remote()
    get(actor.two.remote())
    gate = later.remote(str(tmp_path / "go"))
    first = actor.one.remote(gate)
    second = actor.one.remote(10)
    assert get(actor.two.remote()) == 2
    error = caught(lambda: get(second, 0.2), exceptions.GetTimeoutError)
    assert f"behind the earlier call {cls.__qualname__}.one (t_" in str(error)
    assert "whose argument waits for" in str(error)
    assert "later (t_" in str(error)
    assert "PENDING" not in str(error)
    error = caught(lambda: get(first, 0.2), exceptions.GetTimeoutError)
    assert "its argument waits for" in str(error)
    assert "later (t_" in str(error)
    (tmp_path / "go").touch()
    assert get([first, second]) == [1, 10]


def test_calls_of_actors_that_run_several_at_once_go_past_an_unready_one(tmp_path: Path) -> None:
    class Plain:
        def same(self, x: int) -> int:
            return x

    class Async:
        async def same(self, x: int) -> int:
            return x

    gate = later.remote(str(tmp_path / "go"))
    free = [
        stoker.remote(max_concurrency=2)(Plain).remote(),
        stoker.remote(Async).remote(),
        stoker.remote(allow_out_of_order_execution=True)(Plain).remote(),
    ]
    bound = [
        stoker.remote(Plain).remote(),
        stoker.remote(max_concurrency=2, allow_out_of_order_execution=False)(Plain).remote(),
        stoker.remote(max_concurrency=1)(Async).remote(),
    ]
    get([actor.ready() for actor in free + bound])
    held = [actor.same.remote(gate) for actor in free + bound]
    assert get([actor.same.remote(2) for actor in free]) == [2, 2, 2]
    behind = [actor.same.remote(3) for actor in bound]
    for ref in behind:
        assert "behind the earlier call" in str(
            caught(lambda ref=ref: get(ref, 0.1), exceptions.GetTimeoutError)
        )
    (tmp_path / "go").touch()
    assert get(held) == [1] * 6
    assert get(behind) == [3] * 3


def test_a_cancelled_call_holds_up_nobody(tmp_path: Path) -> None:
    class Plain:
        def same(self, x: int) -> int:
            return x

    actor = stoker.remote(Plain).remote()
    gate = later.remote(str(tmp_path / "go"))
    first, second, third = actor.same.remote(gate), actor.same.remote(gate), actor.same.remote(3)
    stoker.cancel(second)
    stoker.cancel(first)
    assert get(third) == 3
    (tmp_path / "go").touch()
    for ref in (first, second):
        assert isinstance(caught(lambda ref=ref: get(ref)), exceptions.TaskCancelledError)
