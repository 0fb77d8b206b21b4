"""Elastic policies by name: Stoker's own, installed ones, and what is done about those that are not there."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.core.elastic.baselines import Fifo
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.elastic import policies
from stoker_scheduler.simulation.elastic.policies import KINDS, kinds

if TYPE_CHECKING:
    from collections.abc import Iterable


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What is installed, to be filled by a test."""
    there: list[EntryPoint] = []

    def found(group: str) -> Iterable[EntryPoint]:
        assert group == policies.GROUP
        return there

    monkeypatch.setattr(policies, "entry_points", found)
    return there


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, policies.GROUP)


def test_each_queue_has_one_of_its_own(entry_points: list[EntryPoint]) -> None:
    assert isinstance(policies.make("stoker"), GoodputPolicy)
    assert policies.make("pollux") is not policies.make("pollux")


def test_an_installed_one_is_made_and_can_be_simulated(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("mine", "stoker_scheduler.core.elastic.baselines:Fifo"))
    entry_points.append(point("stoker", "stoker_scheduler.core.elastic.baselines:Fifo"))
    assert isinstance(policies.make("mine"), Fifo)
    assert isinstance(policies.make("stoker"), GoodputPolicy), "a name of ours is ours"
    assert set(kinds()) == {*KINDS, "mine"}
    assert isinstance(kinds()["mine"].make(0), Fifo)


def test_what_is_not_there_or_cannot_be_imported_is_said_and_ours_stands_in(
    entry_points: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    entry_points.append(point("broken", "no_such_module:Policy"))
    assert isinstance(policies.make("broken"), GoodputPolicy)
    assert "elastic policy broken is not usable" in caplog.text
    assert "there is no elastic policy 'broken'" in caplog.text
