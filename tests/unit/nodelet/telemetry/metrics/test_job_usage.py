"""What jobs are charged with: each second of a CPU once, GPUs for as long as they are held."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stoker_nodelet.core import WorkerEntry, WorkerPhase
from stoker_nodelet.telemetry.metrics import job_usage
from stoker_nodelet.telemetry.metrics.job_usage import JobUsage

if TYPE_CHECKING:
    import pytest


def worker(job_id: str, number: int = 1, pid: int = 7, **more: dict[int, float]) -> WorkerEntry:
    return WorkerEntry(f"w_{number}", WorkerPhase.LEASED, 0.0, 0.0, job_id=job_id, pid=pid, **more)  # type: ignore[arg-type]


async def test_cpu_time_counts_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = {7: 1.0, 8: 10.0}
    monkeypatch.setattr(job_usage.process_tree, "tree_cpu_s", cpu_s.__getitem__)
    usage, one, other = JobUsage(10), worker("job_a"), worker("job_a", 2, 8)
    fresh = worker("", 3, 9)
    await usage.measure([one, other, fresh])
    await usage.measure([one, other])
    assert usage.cpu_s == {"job_a": 11.0}
    cpu_s[7] = 1.5
    await usage.measure([one])
    usage.ended(one, 2.0)
    usage.ended(other, 9.0)  # less than was seen: a child took its share with it
    assert usage.cpu_s == {"job_a": 12.0}
    usage.ended(worker("job_b", 4), 3.0)
    assert usage.cpu_s == {"job_a": 12.0, "job_b": 3.0}, "one that nobody measured before its end"


async def test_one_that_ends_while_it_is_measured_is_charged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage, one = JobUsage(10), worker("job_a")

    def read(pid: int) -> float:
        usage.ended(one, 5.0)
        return 4.0

    monkeypatch.setattr(job_usage.process_tree, "tree_cpu_s", read)
    await usage.measure([one])
    assert usage.cpu_s == {"job_a": 5.0}
    assert not usage._counted_s, "nothing is kept of it"


def test_gpus_count_for_as_long_as_they_are_held() -> None:
    usage, one = JobUsage(10), worker("job_a", gpus={0: 1.0, 1: 0.5})
    usage.tick([one], 100.0)
    usage.tick([one], 102.0)
    usage.tick([], 110.0)
    usage.tick([worker("job_b", 2)], 120.0)
    assert usage.gpu_s == {"job_a": 3.0}


def test_jobs_beyond_the_limit_are_one() -> None:
    usage = JobUsage(1)
    for number, job_id in enumerate(("job_a", "job_b", "job_c")):
        usage.ended(worker(job_id, number), 2.0)
    assert usage.cpu_s == {"job_a": 2.0, "other": 4.0}


async def test_a_real_process_is_measured() -> None:
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    usage = JobUsage(1)
    await usage.measure([worker("job_a", pid=os.getpid())])
    assert usage.cpu_s["job_a"] >= 0.1
