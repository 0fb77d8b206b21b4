"""Metrics of tasks, counted from rows as they are stored: each end once, functions bounded."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from stoker_gcs.controllers.task_metrics import TaskMetrics
from stoker_gcs.store.task_merge import inferred_end
from stoker_wire.data.spool import TaskRow, row_of
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState
from stoker_wire.process.metrics import Metrics


def record(number: int, state: TaskState = TaskState.FINISHED, **more: object) -> TaskRecord:
    facts: dict[str, object] = {
        "name": "f", "submitted_at_s": 100.0, "started_at_s": 103.0, "ended_at_s": 103.5, **more
    }  # fmt: skip
    return TaskRecord(task_id=f"t_{number}", attempt=0, state=state, job_id="job_1", **facts)  # type: ignore[arg-type]


def counted(*rows: TaskRow, most: int = 10) -> dict[tuple[str, ...], float]:
    """Name and values of labels -> value, after some rows."""
    metrics = Metrics("gcs")
    TaskMetrics(metrics, most).count(rows)
    return {
        (sample.name.removeprefix("stoker_task"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith("stoker_task") and not sample.name.endswith("_bucket")
    }


def test_an_end_counts_with_its_run_and_its_wait() -> None:
    found = counted(row_of(record(1)), row_of(record(2, TaskState.RUNNING)))
    assert found == {
        ("s_ended_total", "f", "FINISHED"): 1,
        ("_run_seconds_sum", "f"): 0.5,
        ("_run_seconds_count", "f"): 1,
        ("_wait_seconds_sum", "f"): 3.0,
        ("_wait_seconds_count", "f"): 1,
    }


def test_an_end_that_comes_again_counts_once() -> None:
    open_ = record(1, TaskState.RUNNING)
    inferred = row_of(inferred_end(open_, "its node died", 110.0))
    found = counted(inferred, row_of(record(1)), row_of(record(1)), row_of(record(2)))
    assert found["s_ended_total", "f", "FAILED"] == 1
    assert found["s_ended_total", "f", "FINISHED"] == 1
    assert found["_failures_total", "worker_died"] == 1


def test_a_failure_counts_by_its_code() -> None:
    error = ErrorInfo(code="task_failed", message="no")
    found = counted(*(row_of(record(n, TaskState.FAILED, error=error)) for n in range(3)))
    assert found["_failures_total", "task_failed"] == 3


def test_one_that_never_started_has_no_times() -> None:
    found = counted(row_of(record(1, TaskState.CANCELLED, started_at_s=None)))
    assert found["s_ended_total", "f", "CANCELLED"] == 1
    assert found["_run_seconds_count", "f"] == found["_wait_seconds_count", "f"] == 0


def test_a_clock_that_ran_backwards_gives_no_negative_time() -> None:
    found = counted(row_of(record(1, ended_at_s=90.0, submitted_at_s=200.0)))
    assert found["_run_seconds_sum", "f"] == found["_wait_seconds_sum", "f"] == 0


def test_functions_beyond_the_limit_are_other() -> None:
    rows = [row_of(record(number, name=f"f{number}")) for number in range(5)]
    found = counted(*rows, most=2)
    assert found["s_ended_total", "f0", "FINISHED"] == 1
    assert found["s_ended_total", "other", "FINISHED"] == 3
    assert found["_run_seconds_count", "other"] == 3


def test_a_damaged_row_and_one_of_the_first_version_count_without_times() -> None:
    whole = row_of(record(1))
    found = counted((*whole[:8], b"\x93\x01"), ("t_2", *whole[1:8], b"\x81\xa1a\x01"))
    assert found["s_ended_total", "f", "FINISHED"] == 2
    assert found["_run_seconds_count", "f"] == 0
