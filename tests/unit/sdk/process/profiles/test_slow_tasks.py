"""The usual durations of functions: enough runs, and no more memory than agreed."""

from __future__ import annotations

from stoker.runtime.process.profiles.slow_tasks import (
    FUNCTIONS,
    LEAST_RUNS,
    RUNS,
    UsualDurations,
    text_of,
)
from stoker_wire.messages.node_api import StackFrame, ThreadStack


def test_a_function_is_judged_after_enough_runs() -> None:
    usual = UsualDurations()
    for _ in range(LEAST_RUNS - 1):
        usual.add("f", 1.0)
    assert usual.p99_s("f") is None
    usual.add("f", 3.0)
    assert usual.p99_s("f") == (3.0, LEAST_RUNS)
    assert usual.p99_s("g") is None


def test_one_run_of_a_hundred_is_not_the_measure() -> None:
    usual = UsualDurations()
    for seconds in [60.0] + [1.0] * 98 + [2.0]:
        usual.add("f", seconds)
    assert usual.p99_s("f") == (2.0, RUNS)


def test_old_runs_and_functions_that_ran_long_ago_are_forgotten() -> None:
    usual = UsualDurations()
    for _ in range(2 * RUNS):
        usual.add("first", 1.0)
    assert usual.p99_s("first") == (1.0, RUNS)
    for number in range(FUNCTIONS - 1):
        usual.add(f"f{number}", 1.0)
    usual.add("first", 1.0)  # it is the newest now
    usual.add("one more", 1.0)
    assert usual.p99_s("first") is not None
    assert len(usual._runs) == FUNCTIONS
    assert "f0" not in usual._runs


def test_stacks_as_text_have_a_line_per_frame() -> None:
    thread = ThreadStack(name="MainThread", frames=(StackFrame(function="f", file="a.py", line=3),))
    assert text_of((thread,)) == "MainThread\n  f (a.py:3)"
