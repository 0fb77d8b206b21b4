"""Schedules over real HTTP, with a clock of the test: runs, overlaps, missed runs, history, restarts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import BadRequestError, NameTakenError, NotFoundError
from stoker_wire.messages.control import Event, Explanation, Page
from stoker_wire.messages.schedules import (
    ChangeSchedule,
    Concurrency,
    CreateSchedule,
    MissedRuns,
    Schedule,
)
from stoker_wire.messages.work import FinishJob, Job, JobArray, JobState, SubmitJob
from tests.contract.gcs_support import eventually, gcs

if TYPE_CHECKING:
    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client

YEARLY = "0 0 1 1 *"
"""Never due by the clock of the machine while a test runs."""
YEAR_S = 366 * 86_400.0


async def create(client: Client, name: str = "nightly", **options: Any) -> Schedule:
    settings: dict[str, Any] = {"cron": YEARLY, "job": SubmitJob(entrypoint="true"), **options}
    body = CreateSchedule(name=name, **settings)
    made = await client.call("POST", "/v1/schedules", body, reply=Schedule)
    return made


async def get(client: Client, name: str = "nightly") -> Schedule:
    return await client.call("GET", f"/v1/schedules/{name}", reply=Schedule)


async def jobs(client: Client) -> list[Job]:
    return list((await client.call("GET", "/v1/jobs", reply=Page[Job])).items)


async def run(running: Running, client: Client, name: str = "nightly", late_s: float = 0.0) -> str:
    """Let the next time of a schedule come; return the id of the job that it started, if it did."""
    before = await get(client, name)
    assert before.next_at_s is not None

    async def seen() -> bool:
        known = running.app.schedules.view.get(name)
        return known is not None and known.next_at_s == before.next_at_s

    await eventually(seen, "the view has the schedule")
    await running.app.schedule_controller.start_due(before.next_at_s + late_s)
    after = await get(client, name)
    return after.last_job_id if after.runs > before.runs else ""


async def test_a_schedule_is_made_shown_paused_and_deleted(
    served: tuple[Running, Client], client: Client
) -> None:
    made = await create(client, time_zone="Europe/Zurich")
    assert made.user and made.next_at_s is not None and not made.paused
    assert await get(client) == made
    with pytest.raises(NameTakenError, match="stoker schedule delete nightly"):
        await create(client)
    page = await client.call("GET", "/v1/schedules", reply=Page[Schedule])
    assert page.items == (made,)
    path = "/v1/schedules/nightly"
    paused = await client.call("PATCH", path, ChangeSchedule(paused=True), reply=Schedule)
    assert paused.paused and paused.next_at_s is None
    resumed = await client.call("PATCH", path, ChangeSchedule(paused=False), reply=Schedule)
    assert resumed.next_at_s == made.next_at_s
    await client.call("DELETE", path, reply=Schedule)
    for verb, body in (("GET", None), ("DELETE", None), ("PATCH", ChangeSchedule(paused=True))):
        with pytest.raises(NotFoundError, match="no schedule 'nightly'"):
            await client.call(verb, path, body, reply=Schedule)
    query = {"kind": "schedule."}
    events = await client.call("GET", "/v1/events", reply=Page[Event], query=query)
    kinds = [event.kind.partition(".")[2] for event in events.items]
    assert kinds == ["created", "changed", "changed", "deleted"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cron": "every day"}, "cron"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"name": "Nightly"}, "name"),
        ({"concurrency": "Sometimes"}, "concurrency"),
        ({"job": {"entrypoint": "x", "queue": "nowhere"}}, "job.queue"),
        ({"job": {"entrypoint": "x", "retries": -1}}, "job.retries"),
        ({"job": {"entrypoint": "x", "node_filter": "labels.rack ="}}, "job.node_filter"),
        (
            {"job": {"entrypoint": "x", "runtime_env": {"env_vars": {"STOKER_TOKEN": ""}}}},
            "job.runtime_env.env_vars.STOKER_TOKEN",
        ),
        ({"job": {"entrypoint": "x", "array": {"indices": [1, 1]}}}, "job.array.indices"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_field(
    client: Client, options: dict[str, Any], field: str
) -> None:
    body = {"name": "nightly", "cron": YEARLY, "job": {"entrypoint": "x"}, **options}
    with pytest.raises(BadRequestError) as caught:
        await client.call("POST", "/v1/schedules", body, reply=Schedule)
    assert caught.value.field == field


async def test_each_time_starts_one_job_and_old_ones_are_forgotten(
    served: tuple[Running, Client], client: Client
) -> None:
    running = served[0]
    body = SubmitJob(entrypoint="echo hi", retries=2, name="n")
    await create(client, job=body, history_limit=2)
    started = []
    for _ in range(4):
        job_id = await run(running, client)
        started.append(job_id)
        end = FinishJob(state=JobState.SUCCEEDED)
        await client.call("POST", f"/v1/jobs/{job_id}/finish", end, reply=Job)
    assert len(set(started)) == 4
    kept = await jobs(client)
    assert sorted(job.job_id for job in kept) == started[1:], "two before the last"
    assert {(job.schedule, job.entrypoint, job.retries) for job in kept} == {
        ("nightly", "echo hi", 2)
    }
    assert (await get(client)).runs == 4
    alike = SubmitJob(entrypoint="true", job_id="job_nightly.mine")
    await client.call("POST", "/v1/jobs", alike, reply=Job)
    query = {"schedule": "nightly"}
    listed = await client.call("GET", "/v1/jobs", reply=Page[Job], query=query)
    assert [job.job_id for job in listed.items] == [job.job_id for job in kept]


async def test_the_explanation_of_a_job_says_what_its_schedule_does_next(
    served: tuple[Running, Client], client: Client
) -> None:
    await create(client)
    job_id = await run(served[0], client)

    async def said() -> str:
        why = await client.call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation)
        return why.summary

    assert "the next job of its schedule nightly comes in" in await said()
    change = ChangeSchedule(paused=True)
    await client.call("PATCH", "/v1/schedules/nightly", change, reply=Schedule)
    assert "its schedule nightly is paused" in await said()
    await client.call("DELETE", "/v1/schedules/nightly", reply=Schedule)
    assert "its schedule nightly is deleted" in await said()


@pytest.mark.parametrize("concurrency", list(Concurrency))
async def test_a_run_whose_predecessor_goes_on(
    served: tuple[Running, Client], client: Client, concurrency: Concurrency
) -> None:
    await create(client, concurrency=concurrency)
    first = await run(served[0], client)
    second = await run(served[0], client)
    states = {job.job_id: job.state for job in await jobs(client)}
    match concurrency:
        case Concurrency.ALLOW:
            assert states == {first: JobState.PENDING, second: JobState.PENDING}
        case Concurrency.FORBID:
            assert states == {first: JobState.PENDING} and not second
            schedule = await get(client)
            assert (schedule.skipped, schedule.runs) == (1, 1)
            assert first in schedule.message
        case Concurrency.REPLACE:
            assert states == {first: JobState.STOPPED, second: JobState.PENDING}


async def test_missed_runs_are_skipped_or_made_up_for_once(
    served: tuple[Running, Client], client: Client
) -> None:
    await create(client, "skips")
    await create(client, "makes-up", missed_runs=MissedRuns.RUN_ONCE)
    assert not await run(served[0], client, "skips", late_s=3 * YEAR_S)
    schedules = {one.name: one for one in served[0].app.schedules.view.values()}
    assert schedules["skips"].skipped == 1 and "it may be no later" in schedules["skips"].message
    made_up = await get(client, "makes-up")
    assert made_up.runs == 1 and len(await jobs(client)) == 1, "one run for three years"


async def test_a_run_that_was_not_written_down_is_not_repeated(sqlite_url: str) -> None:
    async with gcs(sqlite_url) as (running, client):
        made = await create(client)
        await eventually(lambda: _knows(running), "the view has the schedule")
        at_s = made.next_at_s
        assert at_s is not None
        lost = await running.app.jobs.submit(
            SubmitJob(entrypoint="true", job_id=_job_id(made)), key=None, schedule="nightly"
        )
    async with gcs(sqlite_url) as (running, client):
        assert await run(running, client) == lost.job_id
        assert [job.job_id for job in await jobs(client)] == [lost.job_id]


async def test_a_run_that_two_leaders_start_is_one(
    served: tuple[Running, Client], client: Client
) -> None:
    made = await create(client)
    assert made.next_at_s is not None
    schedules = served[0].app.schedules
    await asyncio.gather(*(schedules.run_due("nightly", made.next_at_s) for _ in range(3)))
    assert len(await jobs(client)) == 1
    assert (await get(client)).runs == 1


async def test_schedules_are_kept_in_every_store(stored: Client) -> None:
    made = await create(stored, job=SubmitJob(entrypoint="echo", array=JobArray(indices=(1, 2))))
    assert await get(stored) == made
    change = ChangeSchedule(paused=True)
    paused = await stored.call("PATCH", "/v1/schedules/nightly", change, reply=Schedule)
    page = await stored.call("GET", "/v1/schedules", reply=Page[Schedule])
    assert page.items == (paused,)
    await stored.call("DELETE", "/v1/schedules/nightly", reply=Schedule)
    assert (await stored.call("GET", "/v1/schedules", reply=Page[Schedule])).items == ()


async def _knows(running: Running) -> bool:
    return "nightly" in running.app.schedules.view


def _job_id(schedule: Schedule) -> str:
    from stoker_gcs.registry.schedules.rules import job_id_of

    assert schedule.next_at_s is not None
    return job_id_of(schedule, schedule.next_at_s)


async def test_a_run_that_cannot_be_submitted_says_why(
    served: tuple[Running, Client], client: Client
) -> None:
    from stoker_wire.messages.queues import CreateQueue, Queue

    await client.call("POST", "/v1/queues", CreateQueue(name="team"), reply=Queue)
    await create(client, job=SubmitJob(entrypoint="true", queue="team"))
    await client.call("DELETE", "/v1/queues/team", reply=Queue)
    assert not await run(served[0], client)
    assert "there is no queue 'team'" in (await get(client)).message
