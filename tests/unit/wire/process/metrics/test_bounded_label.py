"""Values of a label: so many at once, the rest under ``other``, and room for new ones where old ones idle."""

from __future__ import annotations

from stoker_wire.process.metrics.bounded_label import IDLE_S, OTHER, BoundedLabel


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_are_told_apart_and_the_rest_are_other() -> None:
    label = BoundedLabel(2, [].append, Clock())
    assert [label.of(text) for text in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_an_idle_one_makes_room_and_is_forgotten() -> None:
    clock, forgotten = Clock(), list[str]()
    label = BoundedLabel(2, forgotten.append, clock)
    label.of("a")
    label.of("b")
    clock.now_s += IDLE_S
    label.of("b")
    assert label.of("c") == OTHER and not forgotten
    clock.now_s += 60.0
    assert label.of("c") == "c"
    assert forgotten == ["a"]
    assert [label.of("a"), label.of("b")] == [OTHER, "b"]


def test_with_no_room_all_are_other() -> None:
    assert BoundedLabel(0, [].append).of("a") == OTHER


def test_a_long_name_is_cut_and_an_empty_one_is_other() -> None:
    label = BoundedLabel(5, [].append)
    assert label.of("x" * 1000) == "x" * 200
    assert label.of("") == OTHER
