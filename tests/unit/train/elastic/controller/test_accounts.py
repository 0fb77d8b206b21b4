"""What a change of replicas costs, as the accounts of a job know it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from stoker_train.elastic.controller.accounts import Accounts
from stoker_train.elastic.replica.reports import Paused, Value


class NoRecords:
    """A job's keys in the KV, of which there are none."""

    job_id = "job_1"

    def ledger(self) -> dict[str, bytes]:
        return {}

    def progress(self) -> dict[str, Any]:
        return {}

    def write_ledger(self, changes: Any) -> None: ...

    def write_progress(self, values: Any) -> None: ...


def test_of_samples_that_did_not_come_from_the_loader_nothing_is_claimed() -> None:
    accounts = Accounts(NoRecords())  # type: ignore[arg-type]
    result = accounts.result("", "", finished=True)
    accounts.close()
    assert result.ledger_ok is None
    assert "ctx.loader()" in result.ledger_problems[0]


def test_before_the_first_change_its_cost_is_what_the_first_generation_took_to_form() -> None:
    accounts = Accounts(NoRecords())  # type: ignore[arg-type]
    assert accounts.restart_s is None, "nothing was measured"
    accounts.forming(10.0)
    accounts.forming(10.2)  # told again, as a rank was late
    assert accounts.restart_s is None
    accounts.formed(10.5)
    accounts.forming(60.0)
    accounts.formed(90.0)
    assert accounts.restart_s == pytest.approx(0.5), "a later one is a change, and has its pause"
    for pause_s in (0.2, 0.3):  # the longest pause of a survivor counts
        accounts.paused(Paused(1, 2, "memory", pause_s, 20, 2, 4))
    assert accounts.restart_s == pytest.approx(0.3)
    accounts.close()


def test_a_result_says_why_it_lacks_what_the_loop_returned() -> None:
    accounts = Accounts(NoRecords())  # type: ignore[arg-type]
    assert accounts.result("", "", finished=False).value_problem == ""
    for report, value, problem in (
        (Value(1, pickle.dumps([1, 2])), [1, 2], ""),
        (Value(1, b"", "it is in a file"), None, "it is in a file"),
        (Value(1, b"no pickle"), None, "cannot be read"),
    ):
        accounts.value = report
        result = accounts.result("", "", finished=False)
        assert result.value == value
        assert problem in result.value_problem
        assert bool(problem) == bool(result.value_problem)
    accounts.close()
