"""The task history over real HTTP: rows as the nodelets send them, and ends that are inferred."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.registry import task_history
from stoker_wire.data.spool import frames_of, row_of
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Demand, WorkerExit, WorkersExited
from stoker_wire.messages.control import Explanation, Page
from stoker_wire.messages.work import (
    FinishJob,
    Job,
    JobState,
    ReportTasks,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import attach, eventually, register

if TYPE_CHECKING:
    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


async def test_rows_of_spool_files_are_stored_as_they_come(
    served: tuple[Running, Client], fake: FakeScheduler
) -> None:
    running, client = served
    job = await attach(client)

    def a_task(number: int, state: TaskState, **facts: Any) -> TaskRecord:
        return TaskRecord(
            task_id=f"t_{number}", attempt=0, state=state, job_id=job.job_id, name="f", **facts
        )

    async def spooled(*records: TaskRecord, dropped: int = 0) -> TaskHistoryStatus:
        body = frames_of([row_of(record) for record in records], dropped)
        return await client.call("POST", "/v1/tasks/spooled", body, reply=TaskHistoryStatus)

    queued = a_task(1, TaskState.QUEUED, waiting_for="a lease", submitted_at_s=1.0)
    assert await spooled(queued) == TaskHistoryStatus(accepted=1)
    ended = a_task(1, TaskState.FINISHED, started_at_s=2.0, ended_at_s=3.0, result_nbytes=4)
    for _ in range(2):  # what is sent again changes nothing
        await spooled(ended, a_task(2, TaskState.RUNNING), queued)
    found = await client.call("GET", "/v1/tasks/t_1", reply=TaskRecord)
    assert found == msgspec.structs.replace(ended, submitted_at_s=1.0)
    with pytest.raises(BadRequestError, match="no spool"):
        await client.call("POST", "/v1/tasks/spooled", b"nonsense of some length")
    status = await spooled(dropped=3)
    assert status == TaskHistoryStatus(accepted=0, dropped=3)
    body = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
    await spooled(a_task(3, TaskState.RUNNING))
    late = await client.call("GET", "/v1/tasks/t_3", reply=TaskRecord)
    assert late.state is TaskState.FAILED, "its job has ended"
    assert running.app.history.dropped == 3


async def test_of_many_open_attempts_a_watch_tells_each_later_state_in_its_turn(
    served: tuple[Running, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, client = served
    monkeypatch.setattr(task_history, "_PER_TURN", 2)
    monkeypatch.setattr(task_history, "_LOOKED_UP", 1)
    job = await attach(client)

    async def report(state: TaskState, **facts: Any) -> None:
        records = tuple(
            TaskRecord(
                task_id=f"t_{i}", attempt=0, state=state, job_id=job.job_id, name="f", **facts
            )
            for i in range(5)
        )
        await client.call("POST", "/v1/tasks/report", ReportTasks(records=records))

    async def where() -> dict[str, Any]:
        return {"job_id": job.job_id}

    async def until_all(state: TaskState) -> None:
        told: set[str] = set()
        while len(told) < 5:
            record = await anext(records)
            assert record.state is state
            assert record.task_id not in told
            told.add(record.task_id)

    async with asyncio.timeout(40), aclosing(running.app.history.follow(where)) as records:
        await report(TaskState.RUNNING)
        await until_all(TaskState.RUNNING)
        await report(TaskState.FINISHED, ended_at_s=3.0)
        await until_all(TaskState.FINISHED)


async def test_a_bad_record_is_refused_and_a_damaged_row_breaks_no_list(
    served: tuple[Running, Client],
) -> None:
    running, client = served
    job = await attach(client)
    good = TaskRecord(
        task_id="t_1", attempt=0, state=TaskState.RUNNING, job_id=job.job_id, name="f"
    )
    row = row_of(good)
    for bad in ((*row[:8], b""), (*row[:8], b"\xc1"), ("t_2", 2**63, *row[2:])):
        with pytest.raises(BadRequestError, match="no spool"):
            await client.call("POST", "/v1/tasks/spooled", frames_of([row, bad]))
    record = msgspec.to_builtins(good)
    for change in ({"attempt": 2**63}, {"attempt": -1}, {"started_at_s": 1e300}):
        with pytest.raises(BadRequestError, match=next(iter(change))):
            await client.call("POST", "/v1/tasks/report", {"records": [{**record, **change}]})
    damaged = [
        (f"t_{index}", *row[1:8], facts) for index, facts in enumerate((b"", b"\xc1", b"\x80"))
    ]
    await running.app.state.writer.put_tasks(damaged)  # as an earlier version took it
    page = await client.call("GET", "/v1/tasks", reply=Page[TaskRecord])
    assert {one.task_id for one in page.items} == {"t_0", "t_1", "t_2"}
    assert running.app.history.unreadable == 3
    ended = msgspec.structs.replace(good, state=TaskState.FINISHED, ended_at_s=3.0)
    await client.call("POST", "/v1/tasks/spooled", frames_of([row_of(ended)]))
    assert await client.call("GET", "/v1/tasks/t_1", reply=TaskRecord) == ended
    body = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)

    async def all_ended() -> bool:
        page = await client.call("GET", "/v1/tasks", reply=Page[TaskRecord])
        return all(one.ended_at_s is not None for one in page.items)

    await eventually(all_ended, "damaged rows are closed with their job")


async def test_what_nobody_can_report_any_more_ends_with_its_worker_or_node(
    served: tuple[Running, Client], fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gcs.controllers.reconcile.LAST_REPORTS_S", 0.0)
    _, client = served
    node = await register(client)
    job = await attach(client)
    running = {"state": TaskState.RUNNING, "started_at_s": 1.0, "node_id": "n_1"}
    queued = {"state": TaskState.QUEUED}
    records = tuple(
        TaskRecord(task_id=f"t_{name}", attempt=0, job_id=job.job_id, name="f", **facts)
        for name, facts in {
            "ran": {**running, "worker_id": "w_1"},
            "owned": {**queued, "owner_id": "w_1"},
            "owned_runs": {**running, "worker_id": "w_2", "owner_id": "w_1"},
            "other": {**queued, "owner_id": "p_1"},
            "elsewhere": {**running, "node_id": "n_2", "worker_id": "w_3"},
            "done": {"state": TaskState.FINISHED, "node_id": "n_1", "worker_id": "w_1"},
        }.items()
    )
    await client.call("POST", "/v1/tasks/report", ReportTasks(records=records))

    async def states() -> dict[str, str]:
        page = await client.call("GET", "/v1/tasks", reply=Page[TaskRecord])
        return {record.task_id[2:]: record.state.value for record in page.items}

    def become(**changes: str) -> Callable[[], Awaitable[bool]]:
        async def have() -> bool:
            return {**before, **changes} == await states()

        return have

    before = await states()
    exit_ = WorkerExit(worker_id="w_1", node_id="n_1", job_id=job.job_id, cause="killed")
    body = WorkersExited(exits=(exit_,), incarnation=node.incarnation)
    await client.call("POST", "/v1/workers/exited", body)
    await eventually(become(ran="FAILED", owned="CANCELLED"), "the worker's own are closed")
    before = await states()
    await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": node.incarnation})
    await eventually(become(owned_runs="FAILED"), "the node's own are closed")
    ended = await client.call("GET", "/v1/tasks/t_ran", reply=TaskRecord)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == (
        "worker_died",
        "its worker w_1 ended: killed",
    )


async def test_task_history_is_filtered_and_explained(client: Client, fake: FakeScheduler) -> None:
    job = await attach(client)
    demand = Demand(job_id=job.job_id, resources={"CPU": 99.0}, name="f")
    records = tuple(
        TaskRecord(
            task_id=f"t_{i}",
            attempt=0,
            state=state,
            job_id=job.job_id,
            name="f",
            started_at_s=1.0,
            ended_at_s=2.0,
            demand=demand,
        )
        for i, state in enumerate((TaskState.QUEUED, TaskState.FINISHED, TaskState.RUNNING))
    )
    for _ in range(2):
        done = await client.call(
            "POST", "/v1/tasks/report", ReportTasks(records=records), reply=TaskHistoryStatus
        )
        assert done == TaskHistoryStatus(accepted=3, dropped=0)
    query = {"job_id": job.job_id, "state": "FINISHED"}
    page = await client.call("GET", "/v1/tasks", query=query, reply=Page[TaskRecord])
    assert [record.task_id for record in page.items] == ["t_1"]
    queued = await client.call("GET", "/v1/tasks/t_0/explain", reply=Explanation)
    assert queued.summary == "f waits for 99 CPUs"
    ended = await client.call("GET", "/v1/tasks/t_1/explain", reply=Explanation)
    assert "is FINISHED after 1.000 s" in ended.summary
