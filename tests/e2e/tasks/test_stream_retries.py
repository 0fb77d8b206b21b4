"""Streaming generators whose worker is killed on the way: each item once, in order, and nothing left."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker.runtime import current
from stoker.runtime.tasks.streams import AHEAD
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Cluster

LARGE = 150_000


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not cluster.stored(), 40, "what was made is freed")
    until(
        lambda: not current.runtime().pending._lineage.records, 40, "how it was made is forgotten"
    )
    until(cluster.is_idle, 40, "all leases went back")


def value_of(number: int) -> Any:
    """The items: every third in shared memory, the others in messages."""
    return np.full(LARGE, number % 251, np.uint8) if number % 3 == 0 else number


def same(value: Any, number: int) -> bool:
    expected = value_of(number)
    return type(value) is type(expected) and bool(np.all(value == expected))


def kill(flags: Flags, attempt: int) -> None:
    """Kill the worker that runs an attempt of the generator."""
    os.kill(int(flags.wait(f"attempt-{attempt}")), signal.SIGKILL)


def begin(flags: Flags) -> int:
    """Say which process runs this attempt; return its number."""
    attempt = int(stoker.get_runtime_context().attempt)
    flags.raise_(f"attempt-{attempt}", os.getpid())
    return attempt


@stoker.remote(max_retries=-1)
def items(folder: str, n: int) -> Any:
    from pathlib import Path

    begin(Flags(Path(folder)))
    for number in range(n):
        yield value_of(number)
        if number % 10 == 0:
            time.sleep(0.002)


def test_each_item_comes_once_and_in_order_however_often_the_worker_is_killed(
    flags: Flags, seed: int
) -> None:
    """The consumer reads some items at once, keeps some for later, and drops some unread."""
    n = 2 * AHEAD + 50
    rng = random.Random(seed)
    kills = sorted(rng.sample(range(1, n - AHEAD), 3))
    stream = items.remote(str(flags.folder), n)
    kept: dict[int, Any] = {}
    count = 0
    for count, ref in enumerate(stream, 1):
        number = count - 1
        how = rng.random()
        if how < 0.6:
            assert same(get(ref), number), f"item {number} (seed {seed}, killed at {kills})"
        elif how < 0.8:
            kept[number] = ref
        if number in kills:
            kill(flags, kills.index(number))
    assert count == n, f"seed {seed}, killed at {kills}"
    for number, ref in kept.items():
        assert same(get(ref), number), f"item {number}, kept (seed {seed}, killed at {kills})"
    assert flags.is_up("attempt-3")


def test_a_large_argument_is_there_for_each_attempt(flags: Flags) -> None:
    """It is no longer needed to make items again, for none is left; but the next attempt needs it."""

    @stoker.remote(max_retries=2)
    def halves(array: Any) -> Any:
        attempt = begin(flags)
        yield array[: len(array) // 2]
        if attempt == 0:
            flags.wait("never")
        yield array[len(array) // 2 :]

    array = np.arange(200_000)
    stream = halves.remote(array)
    assert np.array_equal(get(next(stream)), array[:100_000])
    gc.collect()
    entries = current.runtime().objects.table.entries
    until(lambda: not any(one.endswith(".0") for one in list(entries)), 40, "the item is freed")
    kill(flags, 0)
    assert np.array_equal(get(next(stream)), array[100_000:])
    assert list(stream) == []


def test_refs_inside_items_are_those_of_the_attempt_that_lives(flags: Flags) -> None:
    @stoker.remote(max_retries=2)
    def boxes() -> Any:
        attempt = begin(flags)
        for number in range(4):
            yield {"ref": stoker.put([attempt, number])}
        if attempt == 0:
            flags.wait("never")
        flags.raise_("again")
        flags.wait("go")

    stream = boxes.remote()
    refs = [next(stream) for _ in range(4)]
    kill(flags, 0)
    flags.wait("again")
    until(lambda: get(refs[3])["ref"] and value(refs[3]) == [1, 3], 40, "the last is of attempt 1")
    assert [value(ref) for ref in refs] == [[1, number] for number in range(4)]
    flags.raise_("go")
    assert list(stream) == []


def value(ref: Any) -> Any:
    """What the ref inside an item refers to, or None while its owner is a dead worker."""
    try:
        return get(get(ref)["ref"])
    except stoker.exceptions.ObjectLostError:
        return None


def test_another_attempt_does_not_run_further_ahead_of_its_reader(flags: Flags) -> None:
    @stoker.remote(max_retries=2)
    def fast() -> Any:
        attempt = begin(flags)
        for number in range(10 * AHEAD):
            flags.folder.joinpath(f"made-{attempt}").write_text(str(number))
            yield number

    def made(attempt: int) -> int:
        name = f"made-{attempt}"
        return int(flags.folder.joinpath(name).read_text() or 0) if flags.is_up(name) else 0

    taken = AHEAD // 2 + 7
    stream = fast.remote()
    assert [get(next(stream)) for _ in range(taken)] == list(range(taken))
    kill(flags, 0)
    until(lambda: made(1) >= AHEAD, 40, "the second attempt runs ahead")
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        assert made(1) <= taken + AHEAD + 1
    assert [get(ref) for ref in stream] == list(range(taken, 10 * AHEAD))


def test_a_stream_that_is_dropped_while_it_is_retried_leaves_nothing(flags: Flags) -> None:
    @stoker.remote(max_retries=2)
    def endless() -> Any:
        attempt = begin(flags)
        try:
            number = 0
            while True:
                yield value_of(number)
                number += 1
        finally:
            flags.raise_(f"stopped-{attempt}")

    stream = endless.remote()
    kept = [next(stream) for _ in range(20)]
    kill(flags, 0)
    flags.wait("attempt-1")
    del stream
    flags.wait("stopped-1")
    assert all(same(get(ref), number) for number, ref in enumerate(kept))


def test_a_method_is_retried_as_its_actor_says(flags: Flags) -> None:
    @stoker.remote(max_restarts=1, max_task_retries=1)
    class Source:
        def __init__(self) -> None:
            self.number = 0

        def items(self, n: int) -> Any:
            """Go on from the state of the actor, which begins anew with it."""
            begin(flags)
            while self.number < n:
                yield value_of(self.number)
                self.number += 1
                time.sleep(0.002)

    source = Source.remote()
    stream = source.items.remote(100)
    first = [get(next(stream)) for _ in range(30)]
    kill(flags, 0)
    values = [*first, *(get(ref) for ref in stream)]
    assert [same(one, number) for number, one in enumerate(values)] == [True] * 100
    stoker.kill(source)
