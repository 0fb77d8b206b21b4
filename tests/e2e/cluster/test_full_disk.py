"""A session whose disk is full, with logs, history and database: calls go on, nothing accepted is lost."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import stoker
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import TaskRecord
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.services import fill, mounted, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
WAIT_S = 60.0
TASKS = 60


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STOKER_DISK_PRESSURE_BYTES", "0")
    monkeypatch.setenv("STOKER_ARENA_MAX_BYTES", str(32 * MIB))
    with mounted(tmp_path / "disk", 96 * MIB) as made, _cluster.embedded(made, num_cpus=2):
        yield made


@stoker.remote(max_retries=0)
def prints(number: int) -> int:
    for _ in range(20):
        sys.stdout.write(f"line of {number} {'x' * 100}\n")
        sys.stderr.write(f"error of {number}\n")
    return number


@pytest.mark.logs(
    r"disk is full", r"No space left", r"waits on disk", r"history", r"spilled", r"database or disk"
)
def test_a_session_on_a_full_disk_goes_on(disk: Path) -> None:
    assert get(prints.remote(-1)) == -1
    before = [stoker.put(np.full(4 * MIB, n, np.uint8)) for n in range(4)]
    other = disk / "others"
    fill(other)
    results = [prints.remote(n) for n in range(TASKS)]
    assert stoker.get(results, timeout=WAIT_S) == list(range(TASKS))
    # Another environment is another worker, whose log is new.
    fresh = prints.options(runtime_env={"env_vars": {"FULL": "1"}})
    assert stoker.get(fresh.remote(77), timeout=WAIT_S) == 77
    assert [int(stoker.get(ref, timeout=WAIT_S)[0]) for ref in before] == list(range(4))
    os.unlink(other)
    assert stoker.get([prints.remote(n) for n in range(5)], timeout=WAIT_S) == list(range(5))
    more = [stoker.put(np.full(4 * MIB, n, np.uint8)) for n in range(12)]
    assert [int(stoker.get(ref, timeout=WAIT_S)[0]) for ref in more] == list(range(12))

    until(lambda: ended() == TASKS + 7, WAIT_S, "the history is complete")
    logs = "".join(path.read_text() for path in disk.glob("**/logs/worker-*.log"))
    assert "line of 4 x" in logs


def ended() -> int:
    """How many tasks the history has as ended well."""
    runtime = stoker.runtime.current.runtime()
    query = {"state": "FINISHED", "limit": 1000}
    call = runtime.clients.gcs.call("GET", "/v1/tasks", reply=Page[TaskRecord], query=query)
    return len(runtime.io.run(call, 20).items)
