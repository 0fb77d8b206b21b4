"""Explanations and plans of the gcs: what it forwards to the scheduler, and what it adds to the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.control import Explanation, Holder, WaitPhase
from stoker_wire.messages.groups import PlanOutcome, PlanReply, PlanRequest
from stoker_wire.messages.work import Dependency, Job, SubmitJob
from tests.contract.gcs_support import eventually, register

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


async def submit(client: Client, job_id: str, **options: Any) -> Job:
    body = SubmitJob(entrypoint="true", job_id=job_id, **options)
    return await client.call("POST", "/v1/jobs", body, reply=Job)


async def test_a_plan_is_the_scheduler_s_for_the_caller(
    client: Client, fake: FakeScheduler
) -> None:
    demand = Demand(job_id="", resources={"CPU": 1})
    for user in ("", "ann"):
        body = PlanRequest(demands=(demand,), user=user)
        reply = await client.call("POST", "/v1/plan", body, reply=PlanReply)
        assert reply.placements[0].outcome is PlanOutcome.WAITS
    assert [plan.user for plan in fake.plans] == ["cluster", "ann"]


async def test_an_explanation_says_until_when_a_job_with_a_timeout_holds_what_is_wanted(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client)
    running = await submit(client, "job_1", timeout_s=60.0)

    async def runs() -> bool:
        job = await client.call("GET", f"/v1/jobs/{running.job_id}", reply=Job)
        return job.lease_id != ""

    await eventually(runs, "the job runs")
    started = await client.call("GET", f"/v1/jobs/{running.job_id}", reply=Job)
    fake.holders = tuple(
        Holder(lease_id=f"l_{job_id}", kind="task", job_id=job_id, node_id="n_1")
        for job_id in (running.job_id, "job_gone")
    )
    fake.held_back.clear()
    waiting = await submit(client, "job_2")
    path = f"/v1/jobs/{waiting.job_id}/explain"
    first, second = (await client.call("GET", path, reply=Explanation)).holders
    assert started.started_at_s is not None and first.until_s == started.started_at_s + 60.0
    assert first.until == "the timeout of its job" and second.until_s is None
    fake.held_back.set()


async def test_a_job_that_is_to_run_after_another_is_in_the_phase_of_dependencies(
    client: Client, fake: FakeScheduler
) -> None:
    first = await submit(client, "job_1")
    second = await submit(client, "job_2", after=(Dependency(job_id=first.job_id),))
    told = await client.call("GET", f"/v1/jobs/{second.job_id}/explain", reply=Explanation)
    assert told.phase is WaitPhase.DEPENDENCY
    assert f"it waits for the end of job {first.job_id}, which is " in told.summary
