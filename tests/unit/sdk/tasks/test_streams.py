"""The items of a stream over several attempts of its task."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.runtime.tasks.streams import AHEAD, Stream
from stoker_wire.messages.data import Credit, Inline, Item, Location, Stored


class FakeObjects:
    """An object store that notes what becomes of locations."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.discarded: list[str] = []
        self.replaced: list[tuple[str, Location]] = []

    def new_ref(self, object_id: str) -> Any:
        return SimpleNamespace(id=object_id, _entry=SimpleNamespace())

    def settle(self, entry: Any, location: Location) -> None:
        pass

    def replace(self, object_id: str, location: Location) -> None:
        self.replaced.append((object_id, location))

    def discard(self, locations: list[Stored]) -> None:
        self.discarded += [f"{one.object_id} on {one.node_id}" for one in locations]


class FakeChannel:
    def __init__(self) -> None:
        self.posted: list[object] = []

    def post(self, message: object) -> None:
        self.posted.append(message)


@pytest.fixture
def objects() -> FakeObjects:
    return FakeObjects()


@pytest.fixture
def stream(objects: FakeObjects) -> Stream:
    io: Any = SimpleNamespace(running=True)
    return Stream("t_1", io, objects, lambda task_id: None)  # type: ignore[arg-type]


def stored(index: int, node_id: str) -> Stored:
    return Stored(1 << 20, node_id, f"http://{node_id}", (), f"o_1.{index}")


def yields(
    stream: Stream, attempt: int, count: int, node_id: str = "", channel: Any = None
) -> list[bool]:
    """Have an attempt yield its first items, large ones if it runs on a node."""
    channel = channel or FakeChannel()
    locations = [stored(i, node_id) if node_id else Inline(b"") for i in range(count)]
    return [
        stream.add_item(channel, Item("t_1", attempt, index, location))
        for index, location in enumerate(locations)
    ]


def test_another_attempt_gives_no_item_twice(stream: Stream, objects: FakeObjects) -> None:
    assert yields(stream, 0, 3) == [True] * 3
    channel = FakeChannel()
    stream._taken = 2
    assert yields(stream, 1, 5, "n_2", channel) == [False] * 3 + [True] * 2
    assert [object_id for object_id, _ in objects.replaced] == ["o_1.0", "o_1.1", "o_1.2"]
    assert channel.posted == [Credit("t_1", 2)]
    assert [ref.id for ref in stream._items] == [f"o_1.{index}" for index in range(5)]


def test_an_attempt_is_past_what_it_has_yielded_itself(stream: Stream) -> None:
    yields(stream, 0, 3)
    assert stream.is_past(0, 2) and not stream.is_past(0, 3)
    assert not stream.is_past(1, 0), "the next one begins anew"
    yields(stream, 1, 1)
    assert stream.is_past(1, 0) and not stream.is_past(1, 1)


def test_what_lost_attempts_stored_and_did_not_report_is_freed_at_the_end(
    stream: Stream, objects: FakeObjects
) -> None:
    yields(stream, 0, 3, "n_1")
    yields(stream, 1, 5, "n_2")
    assert objects.discarded == []
    stream.finish(None, None)
    assert objects.discarded == [
        *(f"o_1.{index} on n_1" for index in range(3, 3 + AHEAD)),
        *(f"o_1.{index} on n_2" for index in range(5, 5 + AHEAD)),
    ]


def test_a_worker_that_ends_its_stream_has_reported_all(
    stream: Stream, objects: FakeObjects
) -> None:
    yields(stream, 0, 3, "n_1")
    stream.finish(3, None)
    assert objects.discarded == []
