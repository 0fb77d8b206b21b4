"""``stoker train verify`` on a live cluster: what it says of a ledger, and with what status it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import FencedError
from stoker_train.elastic.controller.fenced import FencedRecords
from stoker_train.elastic.core.ledger import CHUNK_ENTRIES, Entry, Ledger
from stoker_train.elastic.core.membership import Membership
from stoker_train.elastic.options import Result
from stoker_train.elastic.records import Records
from stoker_wire.ids import Prefix, new_id
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 4
STEPS = CHUNK_ENTRIES + 500


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("verify"), num_cpus=1) as info:
        yield info


def verify(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", "train", "verify", *args],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_ledger_is_proved_or_its_faults_are_named() -> None:
    job_id = str(stoker.get_runtime_context().job_id)
    none = verify(job_id)
    assert none.returncode != 0
    assert f"job {job_id} has no ledger" in none.stderr

    records = FencedRecords(job_id, 1)
    records.take()
    ledger = Ledger()
    ledger.finish()
    records.write_ledger(ledger.changes())
    unknown = verify(job_id)
    assert unknown.returncode == 1
    assert "the loop keeps no ledger" in unknown.stderr
    assert json.loads(verify(job_id, "--json").stdout)["exact"] is None

    ledger = Ledger()
    half = STEPS // 2
    for step in range(STEPS):
        epoch, inside = divmod(step, half)
        ledger.set_length(epoch, half * BATCH)
        ledger.extend([Entry(epoch, step, inside * BATCH, BATCH, 1 + step // 300, BATCH, 0.1)])
    ledger.finish()
    records.write_ledger(ledger.changes())
    right = verify(job_id)
    assert right.returncode == 0, right.stderr
    assert f"exactly once: {STEPS * BATCH} samples" in right.stdout
    found = json.loads(verify(job_id, "--json").stdout)
    assert found["exact"] is True
    assert [one["samples"] for one in found["epochs"]] == [half * BATCH] * 2
    assert found["epochs"][1]["last_generation"] == 1 + (STEPS - 1) // 300

    ledger.truncate(STEPS - 7)
    records.write_ledger(ledger.changes())
    wrong = verify(job_id)
    assert wrong.returncode == 1
    assert f"epoch 1: samples {half * BATCH - 28} to {half * BATCH} were left out" in wrong.stderr


def test_a_controller_that_comes_back_after_another_has_taken_over_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = new_id(Prefix.JOB)
    past, present = FencedRecords(job_id, 1), FencedRecords(job_id, 2)
    past.take()
    first = Membership(job_id, 1, ())
    assert past.write_membership(first, 0)
    ledger = Ledger([], None)
    ledger.extend([Entry(0, 0, 0, BATCH, 1, BATCH, 0.1)])
    past.write_ledger(ledger.changes())
    past.write_progress({"steps": 1})
    assert past.holds()

    present.take()
    assert not past.holds() and present.holds()
    before = present.membership(), Records(job_id).ledger(), present.progress()
    assert before[2]["steps"] == 1, "what it was like is known to the next one"
    ledger.extend([Entry(0, 1, BATCH, BATCH, 1, BATCH, 0.1)])
    with pytest.raises(FencedError, match="attempt 2"):
        past.write_ledger(ledger.changes())
    with pytest.raises(FencedError, match="attempt 2"):
        past.write_progress({"steps": 2})
    with pytest.raises(FencedError, match="attempt 2"):
        past.write_result(Result(error="the scheduler has no more to do with it"))
    with pytest.raises(FencedError, match="attempt 2"):
        past.take()
    assert not past.write_membership(Membership(job_id, 2, ()), 1)
    assert (present.membership(), Records(job_id).ledger(), present.progress()) == before
    assert Records(job_id).result() is None

    assert present.write_membership(Membership(job_id, 2, ()), 1)
    result = Result(steps=1)
    present.write_result(result)
    assert Records(job_id).result() == result
    # One that was stopped between the two writes of its result, and goes on now.
    monkeypatch.setattr(past._ledger, "close", lambda: None)
    past.write_result(Result(error="what was long ago"))
    assert Records(job_id).result() == result
