"""Tasks at an earlier time on every store: as their attempts say, and none where retention removed some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.controllers import retention
from stoker_wire.data.spool import row_of
from stoker_wire.errors import CompactedError
from stoker_wire.messages.events import PastState
from stoker_wire.messages.work import (
    FinishJob,
    Job,
    JobState,
    ReportTasks,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import PATIENT, attach, gcs, migrate, register

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client

KEPT = msgspec.structs.replace(PATIENT, keep_tasks=0, keep_tasks_s=0.0, keep_jobs_s=0.0)


@pytest.fixture(params=("memory", "sqlite", "postgres"))
async def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    made: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(made)
    return made


@pytest.fixture(autouse=True)
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the test when the policies are enforced."""
    monkeypatch.setattr(retention, "EVERY_S", (3600.0, 3600.0))


async def state_at(client: Client, **query: object) -> PastState:
    return await client.call("GET", "/v1/state", reply=PastState, query=query)


async def report(client: Client, *records: TaskRecord) -> None:
    body = ReportTasks(records=records)
    await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)


def task(task_id: str, **more: Any) -> TaskRecord:
    given = {"attempt": 0, "job_id": "job_1", "name": "f", "state": TaskState.FINISHED}
    return TaskRecord(task_id=task_id, **{**given, **more})


async def test_tasks_are_as_the_times_of_their_attempts_say(stored: Client) -> None:
    await register(stored)
    await report(
        stored,
        task("t_1", submitted_at_s=100.0, started_at_s=110.0, ended_at_s=120.0, node_id="n_1"),
        task("t_2", submitted_at_s=115.0, state=TaskState.WAITING, waiting_for="o_1.0"),
        task("t_3", started_at_s=90.0, ended_at_s=95.0, state=TaskState.FAILED),
    )
    counts = {
        at: (await state_at(stored, at=f"{at}.0", count=True)).counts["tasks"]
        for at in (80, 100, 110, 130)
    }
    assert counts == {
        80: {},
        100: {"FAILED": 1, "QUEUED": 1},
        110: {"FAILED": 1, "RUNNING": 1},
        130: {"FAILED": 1, "FINISHED": 1, "WAITING": 1},
    }
    assert "tasks" not in (await state_at(stored, at="130.0")).counts, "only on request"
    on_node = await state_at(stored, at="130.0", kind="tasks", node_id="n_1", count=True)
    assert [one.task_id for one in on_node.tasks] == ["t_1"]
    assert on_node.counts == {"tasks": {"FINISHED": 1}}
    page = await state_at(stored, at="110.0", kind="tasks", state="RUNNING")
    (record,) = page.tasks
    assert (record.task_id, record.ended_at_s, record.node_id) == ("t_1", None, "n_1")
    first = await state_at(stored, at="130.0", kind="tasks", limit=2)
    rest = await state_at(stored, at="130.0", kind="tasks", limit=2, cursor=first.next_cursor)
    assert [one.task_id for one in (*first.tasks, *rest.tasks)] == ["t_1", "t_2", "t_3"]
    assert not rest.next_cursor


async def test_records_of_the_first_version_are_counted_as_well(url: str) -> None:
    record = task("t_1", submitted_at_s=100.0, started_at_s=110.0, ended_at_s=120.0)
    async with gcs(url) as (running, client):
        packed = msgspec.msgpack.encode(record)
        await running.app.state.writer.put_tasks([(*row_of(record)[:8], packed)])
        assert (await state_at(client, at="115.0", count=True)).counts["tasks"] == {"RUNNING": 1}


async def test_where_retention_removed_tasks_410_names_the_oldest_time_that_is_whole(
    url: str,
) -> None:
    settings = msgspec.structs.replace(KEPT, keep_tasks=2)
    async with gcs(url, settings=settings) as (running, client):
        await register(client, "n_1")
        then = str(running.app.state.log.last)
        await report(
            client,
            task("t_1", started_at_s=100.0, ended_at_s=130.0),
            task("t_2", started_at_s=100.0, ended_at_s=120.0),
            task("t_3", started_at_s=125.0, ended_at_s=140.0),
            task("t_4", started_at_s=145.0, ended_at_s=150.0),
        )
        assert (await state_at(client, at="110.0", count=True)).tasks_since_s is None
        await running.app.retention.enforce()
        with pytest.raises(CompactedError) as caught:
            await state_at(client, at="110.0", kind="tasks")
        assert caught.value.status == 410
        assert caught.value.extra["oldest_at_s"] == 130.0
        named = str(caught.value).rpartition("at=")[2]
        (record,) = (await state_at(client, at=named, kind="tasks")).tasks
        assert (record.task_id, record.state) == ("t_3", TaskState.RUNNING)
        past = await state_at(client, at="110.0", count=True)
        assert (past.tasks_since_s, past.counts.get("tasks")) == (130.0, None)
        whole = await state_at(client, at=then, count=True)
        assert whole.counts["nodes"] == {"ALIVE": 1}
        assert whole.counts["tasks"] == {"FINISHED": 2}
        assert len((await state_at(client, kind="tasks")).tasks) == 2


async def test_a_task_that_ran_long_does_not_leave_before_those_that_ended_with_it(
    url: str,
) -> None:
    settings = msgspec.structs.replace(KEPT, keep_tasks=200)
    async with gcs(url, settings=settings) as (running, client):
        job = await attach(client)
        long = task("t_long", job_id=job.job_id, started_at_s=100.0, state=TaskState.RUNNING)
        await report(client, long)
        await report(
            client,
            *(task(f"t_{i:03}", started_at_s=1000.0, ended_at_s=1000.0 + i) for i in range(300)),
        )
        ended = msgspec.structs.replace(long, state=TaskState.FINISHED, ended_at_s=5000.0)
        await report(client, ended)
        assert (await running.app.retention.enforce())["tasks"] == 100
        state = await state_at(client, at="1150.0", count=True)
        assert (state.tasks_since_s, state.counts["tasks"]["RUNNING"]) == (1099.0, 150)
        await report(
            client,
            *(task(f"t_{i}", started_at_s=6000.0, ended_at_s=6000.0) for i in range(400, 700)),
        )
        await running.app.retention.enforce()
        left = await state_at(client, kind="tasks", limit=500)
        assert len(left.tasks) == 200
        assert {one.ended_at_s for one in left.tasks} == {6000.0}


async def test_tasks_that_leave_with_their_job_by_retention_are_missed_and_those_of_a_deleted_job_are_not(
    url: str,
) -> None:
    settings = msgspec.structs.replace(KEPT, keep_jobs_s=0.001)
    async with gcs(url, settings=settings) as (running, client):
        for leaves in (False, True):
            job = await attach(client)
            await report(client, task("t_1", job_id=job.job_id, started_at_s=1.0, ended_at_s=2.0))
            body = FinishJob(state=JobState.SUCCEEDED)
            ended = await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
            if not leaves:
                await client.call("DELETE", f"/v1/jobs/{job.job_id}")
                assert (await state_at(client, at="1.5", kind="tasks")).tasks == ()
                continue
            removed = {}
            while not removed.get("jobs"):
                removed = await running.app.retention.enforce()
            with pytest.raises(CompactedError, match="not kept") as caught:
                await state_at(client, at="1.5", kind="tasks")
            assert ended.ended_at_s is not None
            assert caught.value.extra["oldest_at_s"] >= ended.ended_at_s
            assert (await state_at(client, kind="tasks")).tasks == ()
