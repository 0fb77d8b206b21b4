"""A sample of ``make chaos``: two cells, which the seed chooses; and what its checks find."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.matrix import __main__ as matrix
from tests.chaos.matrix.cell import Outcome, run_cell, slowest, tells, unexplained
from tests.chaos.matrix.faults import FAULTS
from tests.chaos.matrix.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

# What is broken here on purpose is warned of; the cell itself reads the logs for crashes.
pytestmark = pytest.mark.logs(
    r'"level": "warning"', r"^this process: stoker[._]", r"(FATAL|ERROR): "
)


@pytest.mark.parametrize("number", range(2))
def test_answers_are_right_and_nothing_is_lost_doubled_or_left(
    number: int, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    workload = dice.sample([*WORKLOADS], 2)[number]
    fault = dice.sample([name for name in FAULTS if name != "none"], 2)[number]
    outcome = run_cell(workload, fault, seed, tmp_path / "cell")
    if outcome.skipped:
        pytest.skip(f"{fault}: {outcome.skipped}")
    repeat = f"python -m tests.chaos.matrix --seed {seed} --workloads {workload} --faults '{fault}'"
    assert not outcome.broken, f"repeat: {repeat}"


@pytest.mark.parametrize(
    ("states", "what", "right"),
    [
        ({0: "FINISHED"}, "ended", True),
        ({0: "FAILED", 1: "FINISHED"}, "ended", True),
        ({0: "FAILED"}, "failed", True),
        ({}, "ended", False),
        ({1: "FINISHED"}, "ended", False),
        ({0: "FAILED", 2: "FINISHED"}, "ended", False),
        ({0: "RUNNING", 1: "FINISHED"}, "ended", False),
        ({0: "FINISHED", 1: "RUNNING"}, "ended", False),
        ({0: "FINISHED", 1: "FAILED"}, "ended", False),
        ({0: "FINISHED"}, "failed", False),
        ({0: "RUNNING"}, "failed", False),
    ],
)
def test_the_history_has_each_attempt_from_the_first_on_with_its_end(
    states: dict[int, str], what: str, *, right: bool
) -> None:
    assert tells(states, what) is right


def test_the_history_of_a_call_whose_result_was_lost_says_that_it_finished() -> None:
    assert tells({0: "FINISHED"}, "failed", "ObjectLostError")
    assert not tells({0: "FAILED"}, "failed", "ObjectLostError")


@pytest.mark.parametrize(
    ("fault", "reason", "true"),
    [
        (
            "PostgreSQL frozen",
            "its function is being stored in the gcs (the database is away)",
            True,
        ),
        ("PostgreSQL frozen", "it waits for actor Ledger (a_1): it is being created", False),
        ("gcs killed", "it waits for actor Ledger (a_1): the gcs does not answer: refused", True),
        ("gcs killed", "it waits for its argument o_1.0", True),
        ("gcs killed", "it was sent to worker w_1 and has not finished", False),
        ("scheduler frozen", "a lease of 1 CPU (the scheduler does not answer: timeout)", True),
        ("scheduler frozen", "a lease of 1 CPU", False),
        ("nodelet frozen", "it waits for a lease of 1 CPU (node n_1 is silent)", True),
        ("none", "(it has ended)", False),
        ("none", "", False),
    ],
)
def test_a_long_wait_must_name_its_true_reason(fault: str, reason: str, *, true: bool) -> None:
    waits = {"task-0-1": [(12.0, 20.0, reason)]}
    assert bool(unexplained(FAULTS[fault], [], waits, over_s=30.0)) is not true


def test_once_the_fault_is_over_a_wait_may_have_another_reason() -> None:
    waits = {"task-0-1": [(12.0, 20.0, "the gcs does not answer"), (22.0, 30.0, "it is PENDING")]}
    assert not unexplained(FAULTS["gcs killed"], [], waits, over_s=25.0)
    assert unexplained(FAULTS["gcs killed"], [], waits, over_s=35.0)


def test_a_long_wait_of_which_nothing_is_said_is_found() -> None:
    line = _line("ended", 100.0, 115.0)
    assert unexplained(FAULTS["none"], [line], {}, 120.0)
    assert not unexplained(FAULTS["driver frozen"], [line], {}, 120.0), "it could not ask meanwhile"
    for waited_s, found in ((15.1, 0), (25.1, 1)):
        waits = {"task-0-1": [(waited_s, 110.0, "it is PENDING")]}
        assert len(unexplained(FAULTS["driver frozen"], [], waits, 120.0)) == found
    assert not unexplained(FAULTS["none"], [_line("ended", 100.0, 109.0)], {}, 120.0)


def test_the_slowest_call_is_one_that_was_open_during_the_fault() -> None:
    before, through = _line("ended", 1.0, 9.0), _line("ended", 9.0, 16.0)
    begun, after = _line("failed", 14.0, 17.0), _line("ended", 15.5, 40.0)
    unread = _line("began", 2.0, 12.0)
    lines = [before, through, begun, after, unread]
    assert slowest(lines, 10.0, 15.0) == 7.0
    assert slowest([before, after], 10.0, 15.0) == 0.0


def _line(what: str, began_s: float, at_s: float) -> dict[str, Any]:
    return {"what": what, "key": "task-0-1", "began_s": began_s, "at_s": at_s}


def test_a_cell_that_did_not_run_is_told_and_one_for_lack_of_time_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(workload: str, fault: str, seed: int, _: Path) -> Outcome:
        return Outcome(workload, fault, seed, skipped="needs root" if workload == "graph" else "")

    report = tmp_path / "report.md"
    command = ["matrix", "--faults", "none", "--seed", "1", "--report", str(report)]
    monkeypatch.setattr(matrix, "run_cell", run)
    monkeypatch.setattr(matrix.leaks, "mark_this_run", lambda: None)
    monkeypatch.setattr(matrix.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", command)
    assert matrix.main() == 0
    assert "3 of 4 cells ran" in report.read_text()
    assert "1 cells did not run: needs root" in report.read_text()
    monkeypatch.setattr(sys, "argv", [*command, "--budget-s", "-1"])
    assert matrix.main() == 1
    assert "4 cells did not run: the time was up" in report.read_text()
    assert "0 of 4 cells ran" in capsys.readouterr().out
