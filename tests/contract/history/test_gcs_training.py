"""Runs of training over real HTTP: what is stored of reports, who sees it, and when it goes."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import pytest

from stoker_gcs.dashboard.changes import StoredRecords, changes
from stoker_gcs.registry.jobs import training
from stoker_gcs.state import removed_runs, schema
from stoker_wire.data.spool import frames_of, row_of
from stoker_wire.data.training import TrainingReport, report_frames
from stoker_wire.errors import BadRequestError, ForbiddenError, NotFoundError
from stoker_wire.http.client.client import Client
from stoker_wire.http.training import TrainingCurves, TrainingRun
from stoker_wire.messages.control import CreateToken, Page, PersonRole, Token
from stoker_wire.messages.work import (
    FinishJob,
    Job,
    JobState,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import attach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.service import Running

START_S = 1_700_000_000.0


def report(job_id: str, step: int, run: str = "default", **values: float) -> TrainingReport:
    return TrainingReport(job_id, "", run, step, START_S + step / 10, values)


async def send(client: Client, reports: Sequence[TrainingReport]) -> None:
    body = report_frames(reports)
    await client.call("POST", "/v1/tasks/spooled", body, reply=TaskHistoryStatus)


async def runs(client: Client, **query: Any) -> list[TrainingRun]:
    page = await client.call("GET", "/v1/training-runs", reply=Page[TrainingRun], query=query)
    return list(page.items)


async def curves(client: Client, job_id: str, run: str = "default", **query: Any) -> TrainingCurves:
    path = f"/v1/training-runs/{job_id}/{run}"
    found: TrainingCurves = await client.call("GET", path, reply=TrainingCurves, query=query)
    return found


async def test_reports_become_runs_and_curves(stored: Client) -> None:
    job = await attach(stored)
    reports = [report(job.job_id, step, loss=float(step), lr=0.1) for step in range(1000)]
    await send(stored, reports)
    await send(stored, reports[500:])  # as after a lost answer
    await send(stored, [report(job.job_id, 5, "trial-2", loss=math.nan)])
    second, first = await runs(stored, job_id=job.job_id)
    assert (second.run, second.newest, second.steps_per_s) == ("trial-2", {"loss": "nan"}, None)
    assert (first.first_step, first.last_step, first.newest_step) == (0, 999, 999)
    assert first.newest == {"loss": 999.0, "lr": 0.1}
    assert first.steps_per_s == pytest.approx(10.0)
    assert (first.first_at_s, first.newest_at_s, first.note) == (START_S, START_S + 99.9, "")
    found = await curves(stored, job.job_id, points=10)
    assert found.run == first
    assert found.steps_per_point == 100
    loss = found.metrics["loss"]
    assert loss.step == tuple(range(0, 1000, 100))
    assert loss.mean == tuple(49.5 + step for step in loss.step)
    assert (loss.min[1], loss.max[1], loss.nans[1]) == (100.0, 199.0, 0)
    assert loss.at_s[0] == START_S + 9.9
    some = await curves(stored, job.job_id, metrics="loss", points=4, from_step=10, to_step=17)
    assert list(some.metrics) == ["loss"]
    assert some.metrics["loss"].step == (10, 12, 14, 16)
    assert some.metrics["loss"].mean == (10.5, 12.5, 14.5, 16.5)


async def test_runs_come_in_pages(stored: Client) -> None:
    job = await attach(stored)
    for number in range(5):
        await send(stored, [report(job.job_id, 1, f"r{number}", loss=1.0)])
    names, cursor = [], ""
    while True:
        page = await stored.call(
            "GET",
            "/v1/training-runs",
            reply=Page[TrainingRun],
            query={"job_id": job.job_id, "limit": 2, "cursor": cursor, "count": True},
        )
        assert page.total == 5
        names += [run.run for run in page.items]
        cursor = page.next_cursor
        if not cursor:
            break
    assert names == ["r4", "r3", "r2", "r1", "r0"]


async def test_attempts_and_reports_come_in_one_body(stored: Client) -> None:
    job = await attach(stored)
    row = row_of(
        TaskRecord(task_id="t_1", attempt=0, job_id=job.job_id, state=TaskState.RUNNING, name="f")
    )
    body = frames_of([row]) + report_frames([report(job.job_id, 1, loss=1.0)]) + frames_of([row])
    status = await stored.call("POST", "/v1/tasks/spooled", body, reply=TaskHistoryStatus)
    assert status.accepted == 2
    assert len(await runs(stored)) == 1
    with pytest.raises(BadRequestError):
        await stored.call("POST", "/v1/tasks/spooled", body[:-1], reply=TaskHistoryStatus)
    bad = report_frames([report(job.job_id, -1, loss=1.0)])
    with pytest.raises(BadRequestError, match="training"):
        await stored.call("POST", "/v1/tasks/spooled", bad, reply=TaskHistoryStatus)


async def test_what_there_is_not_is_said_with_what_there_is(stored: Client) -> None:
    job = await attach(stored)
    await send(stored, [report(job.job_id, 1, train_loss=1.0)])
    with pytest.raises(NotFoundError, match="no run 'other'"):
        await curves(stored, job.job_id, "other")
    with pytest.raises(NotFoundError, match="train_loss"):
        await curves(stored, job.job_id, metrics="trainloss")
    for query in ({"points": 1}, {"points": 2001}, {"from_step": -1}, {"to_step": 10**16}):
        with pytest.raises(BadRequestError):
            await curves(stored, job.job_id, **query)


async def test_a_job_has_bounds_and_its_runs_say_so(
    stored: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MAX_METRICS", 2)
    monkeypatch.setattr(training, "MAX_RUNS", 2)
    job = await attach(stored)
    await send(stored, [report(job.job_id, 1, a=1.0), report(job.job_id, 1, b=1.0, c=1.0)])
    await send(stored, [report(job.job_id, 1, run, x=1.0) for run in ("two", "three")])
    two, first = await runs(stored)
    assert set(first.newest) == {"a", "b"}
    assert "2 metrics" in first.note
    assert (two.run, "2 runs" in two.note) == ("two", True)
    monkeypatch.setattr(training, "MAX_VALUES", 4)
    await send(stored, [report(job.job_id, step, a=1.0) for step in (2, 3)])
    (_, first) = await runs(stored)
    assert first.newest_step == 2
    assert "4 values" in first.note


async def test_people_see_the_runs_of_their_jobs_and_jobs_report_their_own(
    served: tuple[Running, Client],
) -> None:
    running, root = served

    async with AsyncExitStack() as stack:

        async def as_(token: str) -> Client:
            return await stack.enter_async_context(Client(running.url, token=token, peer="test"))

        async def person(name: str, role: PersonRole) -> Client:
            body = CreateToken(name=name, role=role)
            return await as_((await root.call("POST", "/v1/tokens", body, reply=Token)).secret)

        ann, ben = await person("ann", PersonRole.USER), await person("ben", PersonRole.USER)
        viewer = await person("vic", PersonRole.VIEWER)
        job, other = await attach(ann), await attach(ben)
        await send(await as_(job.token), [report(job.job_id, 1, loss=1.0)])
        for client in (ann, viewer, root, await as_(job.token)):
            assert [run.job_id for run in await runs(client)] == [job.job_id]
            assert (await curves(client, job.job_id)).run.newest_step == 1
        for client in (ben, await as_(other.token)):
            assert await runs(client) == []
            assert await runs(client, job_id=job.job_id) == []
            with pytest.raises(ForbiddenError):
                await curves(client, job.job_id)
            with pytest.raises(ForbiddenError):
                await send(client, [report(job.job_id, 2, loss=1.0)])
        assert (await curves(root, job.job_id)).run.newest_step == 1


async def test_reports_of_no_job_are_forgotten_and_those_of_a_job_go_with_it(
    served: tuple[Running, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removed_runs, "BATCH", 70)
    running, client = served
    await send(client, [report("job_0000000000000000", 1, loss=1.0)])
    assert await runs(client) == []
    job, stays = await attach(client), await attach(client)
    for one in (job, stays):
        await send(client, [report(one.job_id, step, loss=1.0, lr=1.0) for step in range(300)])
    store = running.app.state.store
    before = await store.count(schema.TRAINING_VALUES)
    body = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
    await client.call("DELETE", f"/v1/jobs/{job.job_id}", reply=Job)
    (left,) = await runs(client)
    assert left.job_id == stays.job_id
    assert await store.count(schema.TRAINING_METRICS) == 2
    assert await store.count(schema.TRAINING_VALUES) == before // 2
    assert (await curves(client, stays.job_id)).metrics["lr"].mean == (1.0,) * 300


async def test_a_page_hears_of_reports(served: tuple[Running, Client]) -> None:
    running, client = served
    job, app = await attach(client), running.app
    records = StoredRecords(app.state.store, app.history, app.training)
    heard = changes(app.state.log, records, app.state.log.last, lambda _: True)
    async with asyncio.timeout(20), aclosing(heard):
        assert (await anext(heard)).payload["reports"] == 0
        await send(client, [report(job.job_id, step, loss=1.0) for step in (1, 2)])
        counted = 0
        while counted < 2:
            payload = (await anext(heard)).payload
            assert payload["tasks"] == 0
            counted += payload["reports"]
        assert counted == 2
