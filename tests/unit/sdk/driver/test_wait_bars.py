"""Bars of long waits: shown while they last, for several objects, and taken away at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.driver import wait_bars
from stoker.runtime.driver.wait_bars import WaitBars
from stoker.runtime.driver.wait_notices import COUNTED, DriverWaits, Wait
from stoker.runtime.objects.waiters import ThreadWaiter
from stoker.runtime.process.cells import CELLS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stoker.runtime.driver.progress_bars import Bar


class Shown:
    """What the bars were told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float, bool, str]] = []

    def update(self, key: Hashable, bar: Bar, cell: str = "") -> None:
        self.told.append((bar.done, bar.total, bar.closed, cell))


def begin(waits: DriverWaits, missing: int, ago_s: float) -> Wait:
    waiter = ThreadWaiter()
    waiter.missing = missing
    wait = Wait("get()", [], waits.notice_s, waiter)
    wait.began_s -= ago_s
    waits.current[wait] = None
    return wait


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(wait_bars, "shown_bars", lambda: shown)
    monkeypatch.setattr(CELLS, "of_caller", lambda: "2f6a")
    return shown


def test_a_long_wait_has_a_bar_until_it_ends(shown: Shown) -> None:
    waits = DriverWaits(5.0)
    bars = WaitBars(waits)
    wait = begin(waits, 3, ago_s=6.0)
    waiter: Any = wait.waiter
    waiter.settled()
    bars.tick()
    bars.tick()
    assert shown.told == [(1, 3, False, "2f6a")]
    waiter.settled()
    wait.began_s -= 1.0
    bars.tick()
    del waits.current[wait]
    bars.tick()
    bars.tick()
    assert shown.told[1:] == [(2, 3, False, "2f6a"), (2, 3, True, "2f6a")]


def test_short_waits_and_those_for_one_object_have_none(shown: Shown) -> None:
    waits = DriverWaits(5.0)
    begin(waits, 3, ago_s=1.0)
    begin(waits, 1, ago_s=60.0)
    waits.current[Wait("await", [], 0.0)] = None
    WaitBars(waits).tick()
    assert not shown.told


def test_a_wait_that_has_a_bar_gets_no_other(shown: Shown) -> None:
    waits = DriverWaits(5.0)
    token = COUNTED.set(True)
    try:
        begin(waits, 3, ago_s=60.0)
    finally:
        COUNTED.reset(token)
    WaitBars(waits).tick()
    assert not shown.told
