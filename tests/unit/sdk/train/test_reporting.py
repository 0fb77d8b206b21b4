"""What ``stoker.train.report`` takes, and what it says of anything else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import BadRequestError, StokerError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.process import training_reports
from stoker.runtime.process.training_reports import MANY, WaitingReports
from stoker.train import reporting
from stoker.train.reporting import report
from stoker_wire.data.training import MAX_METRICS, MAX_RUNS, report_frames, reports_in


class Scalar:
    """As numpy's and torch's."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def item(self) -> float:
        if len(self._values) != 1:
            raise ValueError("only one element can be converted")
        return self._values[0]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> WaitingReports:
    """The reports that a process of a job has made."""
    woken: list[Any] = []
    runtime = SimpleNamespace(
        job=SimpleNamespace(job_id="job_1", actor=None),
        io=SimpleNamespace(call_soon=woken.append),
        events=SimpleNamespace(write_reports=None),
    )
    monkeypatch.setattr(current, "runtime", lambda: runtime)
    made = WaitingReports()
    monkeypatch.setattr(reporting, "REPORTS", made)
    monkeypatch.setattr(reporting, "_known", {})
    return made


def test_numbers_of_all_kinds_are_taken(waiting: WaitingReports) -> None:
    report(3, run="a", loss=0.5, n=2, scalar=Scalar(4.0), bad=math.nan, far=-math.inf)
    report(Index(4), loss=1)
    first, second = waiting.take()
    assert (first.job_id, first.run, first.step) == ("job_1", "a", 3)
    bad = first.values.pop("bad")
    assert math.isnan(bad)
    assert first.values == {"loss": 0.5, "n": 2.0, "scalar": 4.0, "far": -math.inf}
    assert (second.run, second.step, second.values) == ("default", 4, {"loss": 1.0})
    assert first.at_s <= second.at_s


class Index:
    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


@pytest.mark.parametrize(
    ("step", "values", "kind", "field"),
    [
        (-1, {"loss": 1}, BadRequestError, "step"),
        (1.5, {"loss": 1}, WrongTypeError, "step"),
        (10**16, {"loss": 1}, BadRequestError, "step"),
        (1, {"loss": "1"}, WrongTypeError, "loss"),
        (1, {"loss": True}, WrongTypeError, "loss"),
        (1, {"loss": None}, WrongTypeError, "loss"),
        (1, {"loss": Scalar(1.0, 2.0)}, WrongTypeError, "loss"),
        (1, {"loss": 10**400}, BadRequestError, "loss"),
        (1, {}, BadRequestError, "values"),
        (1, {"a,b": 1}, BadRequestError, "a,b"),
        (1, {"a\nb": 1}, BadRequestError, "a\nb"),
        (1, {"x" * 65: 1}, BadRequestError, "x" * 65),
        (1, {"run": "a/b", "loss": 1}, BadRequestError, "run"),
        (1, {"run": 3, "loss": 1}, BadRequestError, "run"),
        (1, {"run": ["a"], "loss": 1}, BadRequestError, "run"),
        (1, {"run": "a\n", "loss": 1}, BadRequestError, "run"),
        (1, {f"m{i}": 1 for i in range(MAX_METRICS + 1)}, BadRequestError, "values"),
    ],
)
def test_anything_else_is_refused_by_its_name(
    waiting: WaitingReports, step: Any, values: dict[str, Any], kind: type[StokerError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        report(step, **values)
    assert caught.value.field == field
    assert "\n" in str(caught.value), "it says what to do"
    assert not waiting


def test_names_of_a_run_and_of_a_job_have_bounds(
    waiting: WaitingReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_METRICS):
        report(0, **{f"m{number}": 1})
    with pytest.raises(BadRequestError, match=f"{MAX_METRICS + 1} metrics"):
        report(0, other=1)
    report(1, m0=1, m1=2)
    for number in range(MAX_RUNS - 1):
        report(0, run=f"r{number}", loss=1)
    with pytest.raises(BadRequestError, match="1000 runs"):
        report(0, run="one-more", loss=1)
    runtime = current.runtime()
    monkeypatch.setattr(runtime.job, "job_id", "job_2")
    report(0, run="one-more", other=1)
    assert waiting.take()[-1].job_id == "job_2"


def test_what_was_reported_can_be_read_again(waiting: WaitingReports) -> None:
    for step in range(1234):
        report(step, loss=step, **{"val/acc@5": math.inf})
    reports = waiting.take()
    assert reports_in(report_frames(reports)) == reports


def test_the_newest_stay_where_there_are_too_many(
    waiting: WaitingReports, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training_reports, "MAX_WAITING", 100)
    for step in range(1000):
        report(step, loss=1)
    steps = [one.step for one in waiting.take()]
    assert len(steps) <= 101
    assert steps[-50:] == list(range(950, 1000))
    assert steps == sorted(steps)
    assert waiting.left_out == 1000 - len(steps)
    (said,) = caplog.messages
    assert "left out" in said
    caplog.clear()


def test_many_at_once_are_written_soon(waiting: WaitingReports) -> None:
    reports = [waiting.add(one) for one in [None] * (2 * MANY)]  # type: ignore[arg-type]
    assert [number for number, many in enumerate(reports, 1) if many] == [MANY, 2 * MANY]
