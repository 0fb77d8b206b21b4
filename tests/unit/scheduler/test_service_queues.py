"""Queues in the running scheduler: jobs are in theirs, limits hold with a reason, usage is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stoker_scheduler import jobs as job_directory
from stoker_wire.errors import InfeasibleError, NotFoundError
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.control import Explanation, Page
from stoker_wire.messages.groups import PlanOutcome, PlanReply, PlanRequest
from stoker_wire.messages.queues import Queue, QueueExplanation, QueueUsage
from tests.unit.scheduler.fakes import a_job
from tests.unit.scheduler.service_setup import ids, until

if TYPE_CHECKING:
    from tests.unit.scheduler.service_setup import Setup


async def usage(setup: Setup) -> dict[str, QueueUsage]:
    page = await setup.client.call("GET", "/v1/queue-usage", reply=Page[QueueUsage])
    return {one.name: one for one in page.items}


async def test_a_limit_holds_the_jobs_of_its_queue_and_is_named(setup: Setup) -> None:
    await setup.node(CPU=4)
    setup.gcs.jobs["job_1"] = a_job("job_1", queue="team", user="ann")
    await setup.lead()
    await setup.gcs.tell("queue.created", "team", Queue(name="team", limit={"CPU": 2.0}))

    async def is_known() -> bool:
        return "team" in await usage(setup)

    await until(is_known)
    first = await setup.ask(4, CPU=1)
    assert len(first.granted) == 2, "what the limit allows"
    empty = await setup.ask(CPU=1, wait_s=0.05)
    assert empty.granted == ()
    assert empty.note.startswith(
        "queue 'team' has a limit of 2 CPU, of which 2 CPU is in use; leases of the queue must end"
    )
    demand = Demand(job_id="job_1", resources={"CPU": 1}, name="train")
    told = await setup.client.call("POST", "/v1/explain", demand, reply=Explanation)
    assert told.summary.startswith("queue 'team' has a limit of 2 CPU")
    assert "stoker queue set team --limit CPU=AMOUNT" in told.remedy
    with pytest.raises(InfeasibleError, match="3 CPU can never start: queue 'team' has a limit"):
        await setup.ask(CPU=3)
    waiting = asyncio.create_task(setup.ask(CPU=1))

    async def is_held() -> bool:
        found = (await usage(setup))["team"]
        return (found.waiting, found.leases, found.share) == (1, 2, 0.5) and bool(found.held)

    await until(is_held)
    assert (await setup.ask(2, job="job_2", CPU=1)).granted, "another queue"
    await setup.gcs.tell("queue.changed", "team", Queue(name="team", limit={"CPU": 3.0}))
    await setup.release(*ids(first)[:1])
    assert (await waiting).granted


async def test_a_queue_is_explained_and_one_that_nobody_knows_is_named(setup: Setup) -> None:
    await setup.node(CPU=4)
    setup.gcs.jobs["job_1"] = a_job("job_1", queue="team", user="ann")
    await setup.lead()
    await setup.gcs.tell(
        "queue.created", "team", Queue(name="team", quota={"CPU": 1.0}, limit={"CPU": 2.0})
    )

    async def explained() -> QueueExplanation | None:
        try:
            return await setup.client.call("GET", "/v1/queues/team/explain", reply=QueueExplanation)
        except NotFoundError as error:
            assert "queue 'team'" in str(error)
            return None

    async def is_known() -> bool:
        return await explained() is not None

    await until(is_known)
    await setup.ask(2, CPU=1)
    waiting = asyncio.create_task(setup.ask(CPU=1))

    async def waits() -> bool:
        told = await explained()
        return told is not None and told.waiting_count == 1

    await until(waits)
    told = await explained()
    assert told is not None and told.borrowed == {"CPU": 1.0} and told.usage.leases == 2
    (waiter,) = told.waiting
    assert (waiter.user, waiter.resources) == ("ann", {"CPU": 1.0})
    assert waiter.held.startswith("queue 'team' has a limit") and "--limit" in told.limits[0]
    waiting.cancel()


async def test_a_plan_is_made_in_the_queue_of_its_job(setup: Setup) -> None:
    await setup.node(CPU=4)
    setup.gcs.jobs["job_1"] = a_job("job_1", queue="team", user="ann")
    await setup.lead()
    await setup.gcs.tell("queue.created", "team", Queue(name="team", limit={"CPU": 2.0}))

    async def outcome(**options: str) -> PlanOutcome:
        demand = Demand(job_id="", resources={"CPU": 3})
        body = PlanRequest(demands=(demand,), **options)
        reply = await setup.client.call("POST", "/v1/plan", body, reply=PlanReply)
        return reply.placements[0].outcome

    async def is_limited() -> bool:
        return await outcome(queue="team") is PlanOutcome.REJECTED

    await until(is_limited)
    assert await outcome(job_id="job_1") is PlanOutcome.REJECTED
    assert await outcome() is PlanOutcome.STARTS
    with pytest.raises(NotFoundError, match="no job 'job_none'"):
        await outcome(job_id="job_none")


async def test_a_job_that_the_feed_tells_of_late_is_waited_for(setup: Setup) -> None:
    await setup.node(CPU=4)
    await setup.lead()
    asked = asyncio.create_task(setup.ask(job="job_9", CPU=1))
    await asyncio.sleep(job_directory.ARRIVAL_S / 10)
    await setup.gcs.tell("job.started", "job_9", a_job("job_9", queue="late"))
    assert (await asked).granted

    async def is_there() -> bool:
        return (await usage(setup)).get("late", QueueUsage(name="late")).leases == 1

    await until(is_there)


async def test_a_job_that_nobody_tells_of_is_in_the_default_queue(setup: Setup) -> None:
    await setup.node(CPU=4)
    await setup.lead()
    assert (await setup.ask(job="job_8", CPU=1)).granted
    assert (await usage(setup))["default"].leases == 1


async def test_a_jobs_priority_is_added_to_that_of_its_tasks(setup: Setup) -> None:
    await setup.node(CPU=1)
    setup.gcs.jobs["job_2"] = a_job("job_2", priority=5)
    await setup.lead()
    held = await setup.ask(CPU=1)
    low = asyncio.create_task(setup.ask(owner="p_2", CPU=1, options={"priority": 3}))

    async def waits(count: int) -> bool:
        return (await usage(setup))["default"].waiting == count

    await until(lambda: waits(1))
    high = asyncio.create_task(setup.ask(owner="p_3", job="job_2", CPU=1))
    await until(lambda: waits(2))
    await setup.release(*ids(held))
    granted = await high
    assert granted.granted and not low.done()
    await setup.release(*ids(granted))
    assert (await low).granted


async def test_a_lease_of_nothing_counts_in_a_queue_that_is_not_known(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    assert ids(await setup.ask(CPU=0))
    await setup.gcs.tell("queue.created", "team", Queue(name="team"))

    async def is_known() -> bool:
        return "team" in await usage(setup)

    await until(is_known)
    assert (await usage(setup))["default"].leases == 1
