"""Counts of tasks and histograms of their times say at every moment what the attempts themselves say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from stoker_gcs.state import schema
from stoker_gcs.store.opening import open_store
from stoker_gcs.store.task_counts import (
    CPU,
    GPU,
    GROUP_CPU,
    GROUP_GPU,
    MAX_NAMES,
    OTHERS,
    Changed,
    NamesInUse,
    bucket_of,
    held_times,
    middle_of,
    stored,
)
from stoker_wire.data.spool import row_of
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState
from tests.contract.gcs_support import migrate

if TYPE_CHECKING:
    from stoker_gcs.store.protocol import Store
    from stoker_wire.data.spool import TaskRow

STATES = list(TaskState)


def reported(dice: random.Random, at_s: float) -> TaskRow:
    """A report of one of a few attempts, of any state and with any of its times."""
    state = dice.choice(STATES)
    failed = state in (TaskState.FAILED, TaskState.CANCELLED)
    inferred = {"inferred": True} if dice.random() < 0.4 else {}
    code = dice.choice(("task_error", "worker_died"))

    def maybe(value: float) -> float | None:
        return value if dice.random() < 0.8 else None

    return row_of(
        TaskRecord(
            task_id=f"t_{dice.randrange(12)}",
            attempt=dice.randrange(2),
            job_id="job_1",
            state=state,
            name=dice.choice(("f", "g", "")),
            worker_id=dice.choice(("w_1", "")),
            cpus=dice.choice((0.0, 0.5, 2.0)),
            gpus=dice.choice((0.0, 1.0)),
            group_id=dice.choice(("pg_1", "")),
            submitted_at_s=maybe(at_s),
            started_at_s=maybe(at_s + dice.random()),
            ended_at_s=maybe(at_s + 1 + 9 * dice.random()) if failed or inferred else None,
            error=ErrorInfo(code=code, message="no", extra=inferred) if failed else None,
        )
    )


async def counted(store: Store) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str, int]]]:
    """What the tables say: attempts by name and state, and buckets of times that are not empty."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in await store.select(schema.TASK_COUNTS):
        assert row["count"] >= 0
        counts[row["name"], row["state"]] += row["count"]
    buckets = {
        (row["name"], row["measure"], row["bucket"]): row["count"]
        for row in await store.select(schema.TASK_DURATIONS)
    }
    return +counts, +Counter(buckets)


async def recounted(store: Store) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str, int]]]:
    """What the attempts say."""
    counts: Counter[tuple[str, str]] = Counter()
    buckets: Counter[tuple[str, str, int]] = Counter()
    for row in await store.select(schema.TASKS):
        counts[row["name"], row["state"]] += 1
        submitted, started, ended = (
            row[name] for name in ("submitted_at_s", "started_at_s", "ended_at_s")
        )
        if row["rank"] < 3 or started is None:
            continue
        if submitted is not None:
            buckets[row["name"], "wait", bucket_of(started - submitted)] += 1
        if ended is not None:
            buckets[row["name"], "run", bucket_of(ended - started)] += 1
    return counts, buckets


async def held(store: Store) -> dict[tuple[str, str], float]:
    """What the tables say was held, by name and measure."""
    measures = {"measure": (CPU, GPU, GROUP_CPU, GROUP_GPU)}
    rows = await store.grouped(schema.TASK_DURATIONS, ("name", "measure"), ("total_s",), measures)
    return {(row["name"], row["measure"]): row["total_s"] for row in rows if row["total_s"] > 1e-6}


async def held_again(store: Store) -> dict[tuple[str, str], float]:
    """What the attempts say."""
    sums: Counter[tuple[str, str]] = Counter()
    for row in await store.select(schema.TASKS):
        if row["rank"] < 3:
            continue
        times = held_times([(row["started_at_s"], row["ended_at_s"], row["record"])])
        sums.update({(row["name"], measure): held_s for measure, held_s in times.items()})
    return {key: held_s for key, held_s in sums.items() if held_s > 1e-6}


async def test_counts_agree_with_the_attempts_whatever_is_reported_when(
    store: Store, seed: int
) -> None:
    dice = random.Random(seed)
    for _ in range(60):
        rows = [reported(dice, 1000.0) for _ in range(dice.randrange(1, 8))]
        await store.put_tasks(rows)
        if dice.random() < 0.3:
            await store.put_tasks(rows)  # a nodelet sends again what it had no answer to
        assert await counted(store) == await recounted(store)
        assert await held(store) == pytest.approx(await held_again(store))


def test_what_was_held_is_the_time_times_what() -> None:
    facts = row_of(
        TaskRecord(
            task_id="t_1", attempt=0, job_id="job_1", state=TaskState.FINISHED, name="f",
            cpus=2.0, gpus=0.5, group_id="pg_1",
        )
    )[8]  # fmt: skip
    attempts = [(100.0, 110.0, facts), (None, 5.0, facts), (7.0, 6.0, facts), (1.0, None, facts)]
    assert held_times(attempts) == {CPU: 20.0, GPU: 5.0, GROUP_CPU: 20.0, GROUP_GPU: 5.0}


async def test_concurrent_reports_are_counted_once(store: Store) -> None:
    def attempts(state: TaskState) -> list[TaskRow]:
        return [
            row_of(
                TaskRecord(task_id=f"t_{i:03}", attempt=0, job_id="job_1", state=state, name="f")
            )
            for i in range(100)
        ]

    states = (TaskState.QUEUED, TaskState.RUNNING, TaskState.FINISHED)
    await asyncio.gather(*(store.put_tasks(attempts(state)) for state in states for _ in range(3)))
    counts, _ = await counted(store)
    assert counts == {("f", "FINISHED"): 100}
    assert await counted(store) == await recounted(store)


async def test_replicas_count_what_both_report_once(postgres_url: str, seed: int) -> None:
    await migrate(postgres_url)
    replicas = open_store(postgres_url), open_store(postgres_url)
    for one in replicas:
        await one.start()
    dice = random.Random(seed)
    for _ in range(25):
        rows = [reported(dice, 1000.0) for _ in range(dice.randrange(1, 8))]
        await asyncio.gather(*(one.put_tasks(rows) for one in replicas))
    assert await counted(replicas[0]) == await recounted(replicas[1])
    for one in replicas:
        await one.stop()


async def test_a_name_that_no_database_takes_as_it_is_is_counted(store: Store) -> None:
    def attempt(number: int, state: TaskState) -> TaskRow:
        record = TaskRecord(
            task_id=f"t_{number}", attempt=0, job_id="job_1", state=state, name="nul\0"
        )
        return row_of(record)

    await store.put_tasks([attempt(1, TaskState.RUNNING)])
    # One leaves the state into which another comes, and was stored under the name that was possible.
    await store.put_tasks([attempt(1, TaskState.FINISHED), attempt(2, TaskState.RUNNING)])
    counts, _ = await counted(store)
    assert sorted(counts.values()) == [1, 1]
    assert await counted(store) == await recounted(store)


async def test_a_job_with_a_name_for_each_call_has_a_bounded_number_of_counts(
    store: Store,
) -> None:
    def named(first: int, count: int) -> list[TaskRow]:
        return [
            row_of(
                TaskRecord(
                    task_id=f"t_{i}",
                    attempt=0,
                    job_id="job_1",
                    state=TaskState.FINISHED,
                    name=f"call {i}",
                )
            )
            for i in range(first, first + count)
        ]

    await store.put_tasks(named(0, MAX_NAMES - 1))
    await store.put_tasks(named(MAX_NAMES - 1, 50))
    rows = await store.grouped(schema.TASK_COUNTS, ("name",), ("count",), {"job_id": "job_1"})
    assert len(rows) == MAX_NAMES + 1
    assert {row["name"]: row["count"] for row in rows}[OTHERS] == 49
    await store.put_tasks(named(MAX_NAMES + 1, 1))
    rows = await store.grouped(schema.TASK_COUNTS, ("name",), ("count",), {"name": OTHERS})
    assert [row["count"] for row in rows] == [49], "it had been counted before"


def test_names_of_a_job_are_known_throughout_a_batch_however_many_jobs_there_are() -> None:
    names = NamesInUse()
    for number in range(MAX_NAMES + 1):
        names.learn(f"job_{number}", ["f"])
    many = [f"call {number}" for number in range(MAX_NAMES)]
    names.learn("job_0", many)
    in_sql = {"job_0": many, "job_new": []}
    batch = [
        Changed(
            None,
            stored(
                row_of(
                    TaskRecord(
                        task_id=f"t_{job_id}",
                        attempt=0,
                        job_id=job_id,
                        state=TaskState.FINISHED,
                        name="f",
                    )
                )
            ),
        )
        for job_id in in_sql
    ]
    for job_id in names.unknown(batch):
        names.learn(job_id, in_sql[job_id])
    assert names.counted_as("job_0", "one more") == OTHERS


@pytest.mark.parametrize("seconds", [2e-6, 0.001, 0.5, 1.0, 3600.0, 1e7])
def test_a_bucket_is_within_nine_percent_of_what_is_in_it(seconds: float) -> None:
    assert middle_of(bucket_of(seconds)) == pytest.approx(seconds, rel=0.095)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, float("nan"), float("inf")])
def test_what_is_no_duration_is_in_the_first_bucket(seconds: float) -> None:
    assert bucket_of(seconds) == 0 and middle_of(0) == 0.0
