"""Signals that come while the main thread must not be torn: late, but never lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.process.held_signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stop(Exception):
    """What a handler raises."""


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What happened, in order: the handler of SIGUSR2 adds to it, that of SIGUSR1 raises as well."""
    seen: list[str] = []

    def note(*_: Any) -> None:
        seen.append("handled")

    def stop(*_: Any) -> None:
        seen.append("raised")
        raise Stop

    before = signal.signal(signal.SIGUSR2, note), signal.signal(signal.SIGUSR1, stop)
    yield seen
    signal.signal(signal.SIGUSR2, before[0])
    signal.signal(signal.SIGUSR1, before[1])


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def nothing(_: float | None) -> str:
    return "waited"


def test_a_handler_waits_for_the_end_of_the_span(seen: list[str]) -> None:
    with HeldSignals():
        send(signal.SIGUSR2)
        seen.append("work")
    assert seen == ["work", "handled"]


def test_one_that_raises_does_so_behind_the_work(seen: list[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stop), HeldSignals():
        send(signal.SIGUSR1)
        seen.append("work")
    assert seen == ["work", "raised"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_wait_lets_them_through_and_ends_after_one(seen: list[str]) -> None:
    with HeldSignals() as signals:
        assert signals.passing(nothing, None) == "waited"
        send(signal.SIGUSR2)
        assert seen == []
        assert signals.passing(nothing, None) is None
        assert seen == ["handled"]
        threading.Timer(0.05, send, [signal.SIGUSR2]).start()
        began_s = time.monotonic()
        assert signals.passing(lambda t: time.sleep(t or 0), 20.0) is None
        assert time.monotonic() - began_s < 10
    assert seen == ["handled", "handled"]


def test_the_second_of_two_that_raise_is_held_again(seen: list[str]) -> None:
    with pytest.raises(Stop), HeldSignals() as signals:
        send(signal.SIGUSR1)
        with pytest.raises(Stop):
            signals.passing(nothing, None)
        send(signal.SIGUSR1)
        seen.append("cleaned up")
    assert seen == ["raised", "cleaned up", "raised"]


def test_a_span_in_a_handler_leaves_the_outer_one_as_it_was(seen: list[str]) -> None:
    def visit(*_: Any) -> None:
        with HeldSignals() as inner:
            inner.passing(nothing, None)
        seen.append("visited")

    before = signal.signal(signal.SIGUSR2, visit)
    with HeldSignals() as signals:
        send(signal.SIGUSR2)
        signals.passing(nothing, None)
        seen.append("work")
    assert seen == ["visited", "work"]
    assert signal.getsignal(signal.SIGUSR2) is visit
    signal.signal(signal.SIGUSR2, before)


def test_other_threads_have_no_handlers_to_hold(seen: list[str]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with HeldSignals():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    send(signal.SIGUSR2)
    time.sleep(0.001)
    assert seen == ["handled"]
    leave.set()
    thread.join()


def test_a_handler_that_sets_another_is_not_undone(seen: list[str]) -> None:
    """As programs do whose second Ctrl-C is to end them."""
    found: list[Any] = []

    def first(*_: Any) -> None:
        found.append(signal.signal(signal.SIGUSR2, signal.SIG_IGN))

    signal.signal(signal.SIGUSR2, first)
    with HeldSignals() as signals:
        send(signal.SIGUSR2)
        signals.passing(nothing, None)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, found[0])  # what it found there, in the middle of the span
    send(signal.SIGUSR2)
    assert len(found) == 2
