"""``stoker train verify`` on a live cluster: what it says of a ledger, and with what status it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker_train.elastic.core.ledger import CHUNK_ENTRIES, Entry, Ledger, ledger_prefix
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


def keep(ledger: Ledger, job_id: str) -> None:
    for end, value in ledger.changes().items():
        key = ledger_prefix(job_id) + end
        if value is None:
            stoker.kv.delete(key)
        else:
            stoker.kv.put(key, value)


def test_a_ledger_is_proved_or_its_faults_are_named() -> None:
    job_id = str(stoker.get_runtime_context().job_id)
    none = verify(job_id)
    assert none.returncode != 0
    assert f"job {job_id} has no ledger" in none.stderr

    ledger = Ledger()
    half = STEPS // 2
    for step in range(STEPS):
        epoch, inside = divmod(step, half)
        ledger.set_length(epoch, half * BATCH)
        ledger.extend([Entry(epoch, step, inside * BATCH, BATCH, 1 + step // 300, BATCH, 0.1)])
    ledger.finish()
    keep(ledger, job_id)
    right = verify(job_id)
    assert right.returncode == 0, right.stderr
    assert f"exactly once: {STEPS * BATCH} samples" in right.stdout
    found = json.loads(verify(job_id, "--json").stdout)
    assert found["exact"] is True
    assert [one["samples"] for one in found["epochs"]] == [half * BATCH] * 2
    assert found["epochs"][1]["last_generation"] == 1 + (STEPS - 1) // 300

    ledger.truncate(STEPS - 7)
    keep(ledger, job_id)
    wrong = verify(job_id)
    assert wrong.returncode == 1
    assert f"epoch 1: samples {half * BATCH - 28} to {half * BATCH} were left out" in wrong.stderr
