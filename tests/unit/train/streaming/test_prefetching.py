"""Prefetching by a thread: what the source yields and raises, in order, and no thread that stays."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import TYPE_CHECKING

import pytest

from stoker.exceptions import BadRequestError, GetTimeoutError
from stoker_train.streaming.prefetching import Prefetch, prefetch
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 40.0


def threads() -> int:
    return sum(one.name == "stoker-prefetch" for one in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    until(lambda: threads() == 0, WAIT_S, "the threads to end")


def test_items_come_in_order_and_no_further_ahead_than_asked() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    ahead = prefetch(source(), depth=3)
    for number, item in enumerate(ahead):
        assert item == number
        # One is handed over, three wait, and the thread holds another.
        assert len(taken) <= number + 1 + 3 + 1
    assert taken == list(range(20))
    assert list(ahead) == []


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    ahead = prefetch(source())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="broken"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("how", ["close", "with", "break"])
def test_whoever_stops_early_leaves_no_thread(how: str) -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    if how == "with":
        with prefetch(source()) as ahead:
            next(ahead)
    elif how == "close":
        ahead = prefetch(source())
        next(ahead)
        ahead.close()
        assert list(ahead) == []
    else:
        for item in prefetch(source()):
            if item == 5:
                break
        gc.collect()
    assert closed.wait(WAIT_S)


def test_a_source_that_hangs_is_a_timeout_and_is_told_to_stop() -> None:
    hangs = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        hangs.wait(WAIT_S)

    ahead = Prefetch(source(), timeout_s=0.2, interrupt=hangs.set)
    assert next(ahead) == 1
    with pytest.raises(GetTimeoutError, match="prefetch"):
        next(ahead)
    assert hangs.is_set()
    with pytest.raises(BadRequestError):
        prefetch([], depth=0)


def test_a_source_that_comes_nearer_to_an_item_is_not_late() -> None:
    come = threading.Event()
    asked = itertools.count()

    def progress() -> int:
        number = next(asked)
        if number > 4:
            come.set()
        return number

    def source() -> Iterator[int]:
        assert come.wait(WAIT_S)
        yield 1

    assert list(Prefetch(source(), timeout_s=0.05, progress=progress)) == [1]


def test_a_source_that_cannot_be_closed_is_an_error_and_no_wait() -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            raise StopIteration

        def close(self) -> None:
            raise OSError("cannot be closed")

    with pytest.raises(OSError, match="cannot be closed"):
        next(prefetch(Source(), timeout_s=WAIT_S))
