"""Arrows are bounded in number while they wait."""

from __future__ import annotations

from stoker.api.tracing.arrows import Arrows, Place


def test_what_waits_is_bounded_and_the_rest_is_counted() -> None:
    arrows = Arrows(max_waiting=10)
    callee = Place(1, 1, 5, 6)
    for number in range(25):
        assert not list(arrows.add_call(f"t_{number}", 1, 4, callee))
    assert arrows.left_out == 15
    assert len(list(arrows.add_attempt("t_3", 0, Place(1, 2, 0, 9)))) == 2
    arrows.close()
    assert arrows.left_out == 24


def test_callers_that_came_are_remembered_up_to_a_bound() -> None:
    arrows = Arrows(max_waiting=10)
    for number in range(25):
        list(arrows.add_attempt(f"t_{number}", 0, Place(1, 2, 0, 9)))
    callee = Place(1, 1, 5, 6)
    assert len(list(arrows.add_call("t_24", 1, 4, callee))) == 2
    assert not list(arrows.add_call("t_1", 1, 4, callee))


def test_an_arrow_never_points_back_in_time() -> None:
    caller, callee = Place(1, 1, 100, 200), Place(2, 1, 50, 60)
    arrows = Arrows()
    assert not list(arrows.arrow(caller, 120, callee))
    assert arrows.left_out == 1
