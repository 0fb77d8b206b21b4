"""Submitted jobs over real HTTP: after others, no longer than they may, deleted when they have ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from stoker_gcs.registry.jobs.attempts import JobWork
from stoker_wire.errors import BadRequestError, ConflictError, NameTakenError, NotFoundError
from stoker_wire.http.server.service import Request, Service
from stoker_wire.messages.cluster import Demand, RegisteredNode, WorkerExit, WorkersExited
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Event, Explanation, Fit, Page, Verdict
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup, PlacementGroup
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    After,
    AttachDriver,
    CreateActor,
    Dependency,
    EndAttempt,
    FinishJob,
    Job,
    JobArray,
    JobState,
    OnePerNode,
    SubmitJob,
)
from stoker_wire.settings import Settings
from tests.contract.gcs_support import TOKEN, a_node, eventually, gcs, scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


class FakeNodelet:
    """Speaks as much of a nodelet's HTTP as jobs need; ``ended`` has the attempts that it was to end."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []
        self.service = Service("nodelet", Settings(), token=TOKEN)
        self.service.route(
            "POST",
            "/v1/jobs/{job_id}/end-attempt",
            self._end_attempt,
            body=EndAttempt,
            reply=Empty,
            summary="end",
        )

    async def _end_attempt(self, req: Request) -> Empty:
        self.ended.append((req.path["job_id"], req.body.attempt))
        return Empty()


@pytest.fixture
async def nodelet() -> AsyncIterator[FakeNodelet]:
    made = FakeNodelet()
    await made.service.start("127.0.0.1")
    made.service.ready()
    yield made
    await made.service.stop(0.2)


@pytest.fixture
async def client(client: Client, nodelet: FakeNodelet) -> Client:
    """A client of a gcs that knows the node on which the fake scheduler starts everything."""
    await join(client, nodelet)
    return client


async def join(client: Client, nodelet: FakeNodelet) -> RegisteredNode:
    node = a_node(url=nodelet.service.url)
    return await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)


async def submit(client: Client, job_id: str, *after: tuple[str, After], **options: Any) -> Job:
    body = SubmitJob(
        entrypoint="true",
        job_id=job_id,
        after=tuple(Dependency(job_id=one, condition=how) for one, how in after),
        **options,
    )
    return await client.call("POST", "/v1/jobs", body, reply=Job)


async def get(client: Client, job_id: str) -> Job:
    return await client.call("GET", f"/v1/jobs/{job_id}", reply=Job)


async def until(client: Client, job_id: str, state: JobState) -> Job:
    async def reached() -> bool:
        return (await get(client, job_id)).state is state

    await eventually(reached, f"{job_id} is {state}")
    return await get(client, job_id)


async def end(client: Client, job_id: str, state: JobState) -> None:
    await client.call("POST", f"/v1/jobs/{job_id}/finish", FinishJob(state=state), reply=Job)


@pytest.mark.parametrize("ends", [JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED])
@pytest.mark.parametrize("condition", list(After))
async def test_a_job_starts_after_another_if_that_ended_as_it_must(
    client: Client, fake: FakeScheduler, condition: After, ends: JobState
) -> None:
    await submit(client, "job_1")
    await until(client, "job_1", JobState.RUNNING)
    await submit(client, "job_2", ("job_1", condition))

    async def told() -> bool:
        return (await get(client, "job_2")).message == (
            "waits for the end of job job_1, which is RUNNING"
        )

    await eventually(told, "it says what it waits for")
    await end(client, "job_1", ends)
    is_ok = ends is JobState.SUCCEEDED
    if condition is After.ANY or (condition is After.OK) == is_ok:
        await until(client, "job_2", JobState.RUNNING)
    else:
        failed = await until(client, "job_2", JobState.FAILED)
        assert f"that is {ends}" in failed.message


async def test_dependencies_that_are_not_there_are_refused_and_deleted_ones_counted(
    client: Client, fake: FakeScheduler
) -> None:
    for missing in ("job_9", "job_2"):
        with pytest.raises(BadRequestError, match=f"there is no job '{missing}'") as caught:
            await submit(client, "job_2", (missing, After.OK))
        assert caught.value.field == "after.0.job_id"
    await submit(client, "job_1")
    await until(client, "job_1", JobState.RUNNING)
    fake.held_back.clear()
    await submit(client, "job_0")
    await submit(client, "job_any", ("job_0", After.ANY), ("job_1", After.ANY))
    await submit(client, "job_ok", ("job_0", After.ANY), ("job_1", After.OK))
    await end(client, "job_1", JobState.SUCCEEDED)
    await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
    fake.held_back.set()
    await until(client, "job_0", JobState.RUNNING)
    await end(client, "job_0", JobState.SUCCEEDED)
    await until(client, "job_any", JobState.RUNNING)
    assert "is deleted" in (await until(client, "job_ok", JobState.FAILED)).message


async def test_a_job_that_runs_too_long_is_ended(client: Client, fake: FakeScheduler) -> None:
    await submit(client, "job_1", timeout_s=0.5)
    await submit(client, "job_2", timeout_s=1000.0)
    ended = await until(client, "job_1", JobState.FAILED)
    assert ended.message == "it has run for longer than its timeout of 0.5 s"
    assert (await get(client, "job_2")).state is JobState.RUNNING

    async def released() -> bool:
        return ended.lease_id in fake.released

    await eventually(released, "its driver is ended")


async def test_timeouts_and_dependencies_outlive_the_gcs(
    sqlite_url: str, nodelet: FakeNodelet
) -> None:
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        await join(client, nodelet)
        await submit(client, "job_1", timeout_s=5.0)
        await submit(client, "job_2", ("job_1", After.FAILED))
        await until(client, "job_1", JobState.RUNNING)
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        await until(client, "job_1", JobState.FAILED)
        await until(client, "job_2", JobState.RUNNING)


async def test_a_job_that_has_ended_is_deleted_with_its_history(
    client: Client, fake: FakeScheduler
) -> None:
    await submit(client, "job_1")
    job = await until(client, "job_1", JobState.RUNNING)
    with pytest.raises(ConflictError, match="stop it first"):
        await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
    exit_ = WorkerExit(
        worker_id="w_1", node_id="n_1", lease_id=job.lease_id, job_id="job_1", exit_code=0
    )
    report = WorkersExited(exits=(exit_,), incarnation=1)
    await client.call("POST", "/v1/workers/exited", report)
    await until(client, "job_1", JobState.SUCCEEDED)
    await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
    with pytest.raises(NotFoundError):
        await get(client, "job_1")
    with pytest.raises(NotFoundError):
        await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
    events = await client.call(
        "GET", "/v1/events", reply=Page[Event], query={"kind": "job.deleted"}
    )
    assert [event.subject for event in events.items] == ["job_1"]
    with pytest.raises(NameTakenError, match="which is deleted"):
        await submit(client, "job_1")


async def test_a_job_is_deleted_once_what_it_has_made_has_ended(
    client: Client, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, end_work = asyncio.Event(), JobWork.end

    async def end_later(work: JobWork, job: Job) -> None:
        await goes_on.wait()
        await end_work(work, job)

    monkeypatch.setattr(JobWork, "end", end_later)
    await submit(client, "job_1")
    await until(client, "job_1", JobState.RUNNING)
    bundle = Bundle(resources={"CPU": 1.0})
    group = CreatePlacementGroup(group_id="pg_1", job_id="job_1", bundles=(bundle,))
    await client.call("POST", "/v1/placement-groups", group, reply=PlacementGroup)
    await client.call("POST", "/v1/jobs/job_1/stop", reply=Job)
    with pytest.raises(ConflictError, match="pg_1 of job job_1 is still being ended"):
        await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
    goes_on.set()

    async def deleted() -> bool:
        try:
            await client.call("DELETE", "/v1/jobs/job_1", reply=Job)
        except ConflictError:
            return False
        return True

    await eventually(deleted, "the job is deleted")


async def test_an_array_of_which_no_member_starts_in_time_fails(
    client: Client, fake: FakeScheduler
) -> None:
    fake.held_back.clear()
    await submit(client, "job_a", array=JobArray(indices=(0, 1)), start_deadline_s=0.3)
    array = await until(client, "job_a", JobState.FAILED)
    assert "did not start within its start deadline of 0.3 s" in array.message
    await until(client, "job_a.0", JobState.STOPPED)


async def test_an_array_runs_its_members_so_many_at_once(
    client: Client, fake: FakeScheduler
) -> None:
    array = await submit(client, "job_a", array=JobArray(indices=(5, 1, 3, 2), parallelism=2))
    assert array.state is JobState.PENDING
    await until(client, "job_a.1", JobState.RUNNING)
    await until(client, "job_a.2", JobState.RUNNING)
    assert (await get(client, "job_a.3")).state is JobState.PENDING
    drivers = {one.demand.job_id: one.driver for one in fake.requests}
    assert set(drivers) == {"job_a.1", "job_a.2"}
    assert drivers["job_a.2"] is not None
    assert drivers["job_a.2"].env == {"STOKER_ARRAY_ID": "job_a", "STOKER_ARRAY_INDEX": "2"}
    await end(client, "job_a.2", JobState.FAILED)
    await until(client, "job_a.3", JobState.RUNNING)
    for index in (1, 3, 5):
        await until(client, f"job_a.{index}", JobState.RUNNING)
        await end(client, f"job_a.{index}", JobState.SUCCEEDED)
    done = await until(client, "job_a", JobState.FAILED)
    assert done.message == "4 of 4 have ended, 1 without success, as job_a.2: FAILED"
    await client.call("DELETE", "/v1/jobs/job_a", reply=Job)
    with pytest.raises(NotFoundError):
        await get(client, "job_a.1")


async def test_an_array_that_is_stopped_stops_its_members(
    client: Client, fake: FakeScheduler
) -> None:
    await submit(client, "job_a", array=JobArray(indices=tuple(range(20)), parallelism=3))
    await until(client, "job_a.0", JobState.RUNNING)
    await client.call("POST", "/v1/jobs/job_a/stop", reply=Job)
    for index in range(20):
        await until(client, f"job_a.{index}", JobState.STOPPED)


async def test_an_array_goes_on_where_the_leader_before_was(
    sqlite_url: str, nodelet: FakeNodelet
) -> None:
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        await join(client, nodelet)
        await submit(client, "job_a", array=JobArray(indices=(0, 1, 2), parallelism=1))
        await until(client, "job_a.0", JobState.RUNNING)
        await end(client, "job_a.0", JobState.SUCCEEDED)
        await until(client, "job_a.1", JobState.RUNNING)
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        assert (await get(client, "job_a.2")).state is JobState.PENDING, "one at a time, still"
        await end(client, "job_a.1", JobState.SUCCEEDED)
        await until(client, "job_a.2", JobState.RUNNING)
        await end(client, "job_a.2", JobState.SUCCEEDED)
        assert (await until(client, "job_a", JobState.SUCCEEDED)).exit_code == 0


async def test_jobs_that_make_no_sense_are_refused(client: Client) -> None:
    both = SubmitJob(
        entrypoint="true", array=JobArray(indices=(1,)), one_per_node=OnePerNode(parallelism=1)
    )
    with pytest.raises(BadRequestError, match="leave one of the two out") as caught:
        await client.call("POST", "/v1/jobs", both, reply=Job)
    assert caught.value.field == "one_per_node"
    for field, value in (("retries", -1), ("retries", 101), ("retry_delay_s", -1.0)):
        with pytest.raises(BadRequestError) as caught:
            body = {"entrypoint": "true", field: value}
            await client.call("POST", "/v1/jobs", body, reply=Job)
        assert caught.value.field == field
    for indices, says in (((), "array"), ((1, 1), "twice"), ((-1,), "array")):
        body = {"entrypoint": "true", "array": {"indices": indices}}
        with pytest.raises(BadRequestError, match=says):
            await client.call("POST", "/v1/jobs", body, reply=Job)


async def fail(client: Client, job_id: str, attempt: int) -> None:
    """Report the end of a driver as its nodelet does."""
    end = FinishJob(
        state=JobState.FAILED,
        exit_code=1,
        message="the driver exited with code 1",
        node_id="n_1",
        attempt=attempt,
    )
    await client.call("POST", f"/v1/jobs/{job_id}/finish", end, reply=Job)


async def until_attempt(client: Client, job_id: str, attempt: int) -> Job:
    async def reached() -> bool:
        job = await get(client, job_id)
        return (job.attempt, job.state) == (attempt, JobState.RUNNING)

    await eventually(reached, f"attempt {attempt} of {job_id} runs")
    return await get(client, job_id)


async def test_a_driver_that_fails_is_run_again_until_no_retry_is_left(
    client: Client, fake: FakeScheduler, nodelet: FakeNodelet
) -> None:
    await submit(client, "job_1", retries=1, retry_delay_s=0.1)
    first = await until(client, "job_1", JobState.RUNNING)
    actor = CreateActor(
        actor_id="a_1",
        demand=Demand(job_id="job_1", resources={}),
        class_name="A",
        payload=b"",
        name="the one",
    )
    await client.call("POST", "/v1/actors", actor, reply=Actor)
    await fail(client, "job_1", 1)
    await fail(client, "job_1", 1)  # reported twice
    second = await until_attempt(client, "job_1", 2)
    assert second.lease_id != first.lease_id and second.started_at_s == first.started_at_s
    assert nodelet.ended == [("job_1", 1)], "before the second began"
    dead = await client.call("GET", "/v1/actors/a_1", reply=Actor)
    assert dead.state is ActorState.DEAD and dead.death_cause is not None
    assert "attempt 1 of its job job_1 failed" in dead.death_cause.message
    drivers = [one.driver for one in fake.requests if one.driver is not None]
    assert {one.attempt for one in drivers} == {1, 2}
    with pytest.raises(ConflictError, match="is at attempt 2"):
        late = AttachDriver(job_id="job_1", attempt=1)
        await client.call("POST", "/v1/jobs/attach", late, reply=Job)
    await fail(client, "job_1", 2)
    ended = await until(client, "job_1", JobState.FAILED)
    assert (ended.attempt, ended.exit_code, len(ended.attempts)) == (2, 1, 1)
    events = await client.call(
        "GET", "/v1/events", reply=Page[Event], query={"subject": "job_1", "kind": "job.retrying"}
    )
    assert len(events.items) == 1


async def test_a_job_whose_node_dies_is_run_again(
    client: Client, fake: FakeScheduler, nodelet: FakeNodelet
) -> None:
    await submit(client, "job_1", retries=3, retry_delay_s=0.0)
    await until(client, "job_1", JobState.RUNNING)
    again = await join(client, nodelet)
    assert again.incarnation == 2, "the node started again: what ran there is gone"
    second = await until_attempt(client, "job_1", 2)
    assert "started again" in second.attempts[0].cause


@pytest.mark.parametrize("attached", [False, True], ids=["silent", "attached"])
async def test_a_job_whose_grant_is_recorded_after_its_node_started_again_is_run_again(
    client: Client, fake: FakeScheduler, nodelet: FakeNodelet, attached: bool
) -> None:
    await submit(client, "job_1", retries=3, retry_delay_s=0.0)
    await until(client, "job_1", JobState.RUNNING)
    fake.delivers.clear()
    await submit(client, "job_late", retries=1, retry_delay_s=0.0)

    async def granted() -> bool:
        return "l_2" in fake.granted

    await eventually(granted, "the grant is on its way")
    if attached:
        await client.call("POST", "/v1/jobs/attach", AttachDriver(job_id="job_late"), reply=Job)
    await join(client, nodelet)

    async def what_it_had_is_ended() -> bool:
        return (await get(client, "job_1")).attempt == 2

    await eventually(what_it_had_is_ended, "what was on the node is ended")
    fake.delivers.set()
    second = await until_attempt(client, "job_late", 2)
    assert "node n_1 died" in second.attempts[0].cause


async def test_a_retry_waits_for_nodes_that_have_not_ended_the_attempt_before(
    client: Client, fake: FakeScheduler, nodelet: FakeNodelet
) -> None:
    silent = await client.call("POST", "/v1/nodes", a_node("n_2"), reply=RegisteredNode)
    await submit(client, "job_1", retries=1, retry_delay_s=0.0)
    await until(client, "job_1", JobState.RUNNING)
    await fail(client, "job_1", 1)

    async def told() -> bool:
        return "node n_2 has not ended attempt 1" in (await get(client, "job_1")).message

    await eventually(told, "it says what it waits for")
    why = await client.call("GET", "/v1/jobs/job_1/explain", reply=Explanation)
    assert "node n_2 has not ended attempt 1" in why.summary
    assert why.remedy == "the node must answer, or be declared dead: stoker get n_2"
    await client.call("POST", "/v1/nodes/n_2/leave", {"incarnation": silent.incarnation})
    await until_attempt(client, "job_1", 2)


async def test_what_its_user_or_its_timeout_ends_is_not_run_again(
    client: Client, fake: FakeScheduler
) -> None:
    await submit(client, "job_1", retries=5)
    await until(client, "job_1", JobState.RUNNING)
    await client.call("POST", "/v1/jobs/job_1/stop", reply=Job)
    await fail(client, "job_1", 1)
    assert (await get(client, "job_1")).state is JobState.STOPPED
    await submit(client, "job_2", retries=5, retry_delay_s=3600.0, timeout_s=5.0)
    await until(client, "job_2", JobState.RUNNING)
    await fail(client, "job_2", 1)
    why = await client.call("GET", "/v1/jobs/job_2/explain", reply=Explanation)
    assert "attempt 2 of 6 starts in" in why.summary
    ended = await until(client, "job_2", JobState.FAILED)
    assert "longer than its timeout" in ended.message and ended.attempt == 2
    fake.infeasible.add("too large")
    await submit(client, "job_3", retries=5, name="too large")
    assert (await until(client, "job_3", JobState.FAILED)).attempt == 1, "no driver ran"


async def test_retries_outlive_the_gcs(sqlite_url: str, nodelet: FakeNodelet) -> None:
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        await join(client, nodelet)
        await submit(client, "job_1", retries=2, retry_delay_s=1.0)
        await submit(client, "job_a", array=JobArray(indices=(0, 1), parallelism=1), retries=1)
        await until(client, "job_1", JobState.RUNNING)
        await until(client, "job_a.0", JobState.RUNNING)
        await fail(client, "job_1", 1)
        await fail(client, "job_a.0", 1)
    async with gcs(sqlite_url) as (_, client), scheduler(client):
        await until_attempt(client, "job_1", 2)
        assert (await get(client, "job_a.1")).state is JobState.PENDING, "its turn has not come"
        why = await client.call("GET", "/v1/jobs/job_a.1/explain", reply=Explanation)
        assert "waits for its turn in array job_a, which runs 1 at a time" in why.summary


async def test_one_per_node_has_a_member_for_each_node_that_can_run_it(
    client: Client, fake: FakeScheduler
) -> None:
    verdicts = [Verdict("n_2", Fit.NEVER), Verdict("n_3", Fit.BUSY), Verdict("n_1", Fit.FITS)]
    fake.verdicts = tuple(verdicts)
    await submit(client, "job_1", one_per_node=OnePerNode(parallelism=1))
    await until(client, "job_1", JobState.RUNNING)
    await until(client, "job_1.0", JobState.RUNNING)
    second = await get(client, "job_1.1")
    assert (second.state, second.only_node_id) == (JobState.PENDING, "n_3")
    pinned = [one.demand.strategy.node_id for one in fake.requests]
    assert pinned == ["n_1"]
    await end(client, "job_1.0", JobState.SUCCEEDED)
    await until(client, "job_1.1", JobState.RUNNING)
    await end(client, "job_1.1", JobState.SUCCEEDED)
    done = await until(client, "job_1", JobState.SUCCEEDED)
    assert done.message == "2 of 2 have ended"
    fake.verdicts = (Verdict("n_2", Fit.NEVER),)
    await submit(client, "job_2", one_per_node=OnePerNode())
    assert (await until(client, "job_2", JobState.FAILED)).message == "no node can run it"
