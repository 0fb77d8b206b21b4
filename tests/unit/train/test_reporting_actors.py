"""Actors by number: what an actor that was killed still says is not taken for its successor's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import stoker
from stoker_train.reporting_actors import ReportingActors
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


class Silent:
    """The handle of an actor that reports once it is let go, then ends."""

    def __init__(self) -> None:
        self.reports, self.go, self.heard = self, threading.Event(), threading.Event()

    def options(self, **_: Any) -> Silent:
        """Return this."""
        return self

    def remote(self) -> Iterator[list[str]]:
        """Yield a report, late."""
        self.heard.set()
        self.go.wait(40.0)
        yield ["late"]


def test_the_end_of_a_killed_actor_is_not_that_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stoker, "get", lambda ref: ref)
    monkeypatch.setattr(stoker, "kill", lambda handle: None)
    said: list[Any] = []
    actors = ReportingActors("rank", said.append, lambda worker, why: ("died", worker))
    first, second = Silent(), Silent()
    actors.add(0, first)
    assert first.heard.wait(40.0)
    (thread,) = [one for one in threading.enumerate() if one.name == "rank-0"]
    actors.kill(0)
    actors.add(0, second)
    first.go.set()
    thread.join(40.0)
    assert said == []
    second.go.set()
    until(lambda: len(said) == 2, 40.0, "the second is heard")
    assert said == ["late", ("died", 0)]
