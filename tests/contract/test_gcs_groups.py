"""Placement groups over real HTTP and every store, with a fake scheduler that places them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    NameTakenError,
    NotFoundError,
)
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.groups import (
    Bundle,
    CreatePlacementGroup,
    GroupState,
    PlacementGroup,
    PreemptGroup,
    ReleaseBundles,
    Reschedule,
)
from stoker_wire.messages.work import DETACHED_JOB, FinishJob, Job, JobState
from tests.contract.gcs_support import attach, eventually, gcs, register, scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler

BUNDLES = (Bundle(resources={"CPU": 1.0}), Bundle(resources={"CPU": 2.0}))


def a_group(job_id: str, group_id: str = "pg_1", **options: Any) -> CreatePlacementGroup:
    return CreatePlacementGroup(group_id=group_id, job_id=job_id, bundles=BUNDLES, **options)


async def create(client: Client, body: CreatePlacementGroup) -> PlacementGroup:
    return await client.call("POST", "/v1/placement-groups", body, reply=PlacementGroup)


async def get(client: Client, group_id: str = "pg_1", *, wait_s: float = 0.0) -> PlacementGroup:
    return await client.call(
        "GET",
        f"/v1/placement-groups/{group_id}",
        reply=PlacementGroup,
        query={"wait_s": wait_s or None},
        timeout_s=60,
    )


async def remove(client: Client, group_id: str = "pg_1") -> PlacementGroup:
    return await client.call("DELETE", f"/v1/placement-groups/{group_id}", reply=PlacementGroup)


async def until(client: Client, state: GroupState, group_id: str = "pg_1") -> PlacementGroup:
    async def reached() -> bool:
        return (await get(client, group_id)).state is state

    await eventually(reached, f"{group_id} is {state}")
    return await get(client, group_id)


async def test_a_group_is_placed_and_removed(client: Client, fake: FakeScheduler) -> None:
    job = await attach(client)
    made = await create(client, a_group(job.job_id))
    assert made.state is GroupState.PENDING
    placed = await get(client, wait_s=30)
    assert placed.state is GroupState.CREATED
    assert {i: one.node_id for i, one in placed.placements.items()} == {0: "n_1", 1: "n_2"}
    assert (await create(client, a_group(job.job_id))).state is GroupState.CREATED, "the same again"
    gone = await remove(client)
    assert (gone.state, gone.placements) == (GroupState.REMOVED, {})
    assert (await remove(client)).removed_at_s == gone.removed_at_s
    events = await client.call(
        "GET", "/v1/events", reply=Page[Event], query={"kind": "placement_group."}
    )
    assert [event.kind.partition(".")[2] for event in events.items] == [
        "created",
        "placed",
        "removed",
    ]


async def test_it_waits_with_a_reason(client: Client, fake: FakeScheduler) -> None:
    fake.held_back.clear()
    job = await attach(client)
    await create(client, a_group(job.job_id))

    async def told() -> bool:
        return (await get(client)).reason == "3 demands wait before it"

    await eventually(told, "the reason is known")
    assert (await get(client, wait_s=0.2)).state is GroupState.PENDING
    fake.held_back.set()
    assert (await get(client, wait_s=30)).reason == ""


async def test_a_group_that_is_preempted_is_asked_for_again_whole(
    client: Client, fake: FakeScheduler
) -> None:
    job = await attach(client)
    await create(client, a_group(job.job_id, preemptible=True))
    placed = await until(client, GroupState.CREATED)
    path = "/v1/placement-groups/pg_1/preempt"
    order = PreemptGroup(lease_id=placed.placements[1].lease_id, reason="for a test")
    again = await client.call("POST", path, order, reply=PlacementGroup)
    assert (again.placements, again.preemptions) == ({}, 1)
    later = await until(client, GroupState.CREATED)
    assert later.placements[0].lease_id != placed.placements[0].lease_id
    late = await client.call("POST", path, order, reply=PlacementGroup)
    assert late.preemptions == 1, "that lease holds nothing of it any more"


async def test_names_are_unique_among_living_groups(client: Client, fake: FakeScheduler) -> None:
    job = await attach(client)
    await create(client, a_group(job.job_id, name="mine"))
    with pytest.raises(NameTakenError, match="pg_1"):
        await create(client, a_group(job.job_id, "pg_2", name="mine"))
    path = f"/v1/named-placement-groups/{job.namespace}/mine"
    assert (await client.call("GET", path, reply=PlacementGroup)).group_id == "pg_1"
    await remove(client)
    with pytest.raises(NotFoundError, match="no living placement group"):
        await client.call("GET", path, reply=PlacementGroup)
    await create(client, a_group(job.job_id, "pg_2", name="mine"))


async def test_a_job_that_ends_takes_its_groups_unless_they_are_detached(
    client: Client, fake: FakeScheduler
) -> None:
    job = await attach(client)
    await create(client, a_group(job.job_id, "pg_own"))
    await create(client, a_group(job.job_id, "pg_kept", detached=True))
    await create(client, a_group(DETACHED_JOB, "pg_free", detached=True))
    await until(client, GroupState.CREATED, "pg_own")
    end = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", end, reply=Job)
    own = await until(client, GroupState.REMOVED, "pg_own")
    assert "its job" in own.reason
    for group_id in ("pg_kept", "pg_free"):
        assert (await get(client, group_id, wait_s=30)).state is GroupState.CREATED
    with pytest.raises(ConflictError, match="has ended"):
        await create(client, a_group(job.job_id, "pg_late"))


async def test_a_group_that_reschedules_none_goes_on_without_what_it_lost_and_gives_up_the_rest(
    client: Client, fake: FakeScheduler
) -> None:
    node = await register(client)
    await register(client, "n_2")
    job = await attach(client)
    await create(client, a_group(job.job_id, reschedule=Reschedule.NEVER))
    whole = await get(client, wait_s=30)
    (lost,) = (index for index, one in whole.placements.items() if one.node_id == "n_1")
    asked = len(fake.gangs)
    await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": node.incarnation})

    async def is_without() -> bool:
        return (await get(client)).released == (lost,)

    await eventually(is_without, "the lost bundle has left the group")
    group = await get(client)
    assert (group.state, group.attempt, len(fake.gangs)) == (GroupState.CREATED, 0, asked)
    path = "/v1/placement-groups/pg_1/release"
    ended = await client.call("POST", path, ReleaseBundles(bundles=(0, 1)), reply=PlacementGroup)
    assert (ended.state, ended.released) == (GroupState.REMOVED, (0, 1))


@pytest.mark.parametrize("reschedule", [Reschedule.BUNDLES, Reschedule.GROUP])
async def test_a_node_that_dies_has_its_bundles_asked_for_again(
    client: Client, fake: FakeScheduler, reschedule: Reschedule
) -> None:
    node = await register(client)
    await register(client, "n_2")  # else the gcs takes it for a lost one, sooner or later
    job = await attach(client)
    await create(client, a_group(job.job_id, reschedule=reschedule))
    await get(client, wait_s=30)
    fake.held_back.clear()
    await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": node.incarnation})
    waits = await until(client, GroupState.RESCHEDULING)
    assert (waits.attempt, waits.reschedules) == (1, 1)

    async def asked() -> bool:
        return fake.gangs[-1].request_id == "r_pg_1.1"

    await eventually(asked, "the bundles are asked for")
    again = fake.gangs[-1]
    if reschedule is Reschedule.BUNDLES:
        assert (again.indices, again.taken) == ((0,), ("n_2",))
    else:
        assert (again.indices, again.taken) == ((0, 1), ())
    fake.held_back.set()
    assert (await get(client, wait_s=30)).state is GroupState.CREATED


async def test_what_makes_no_sense_is_refused(client: Client) -> None:
    job = await attach(client)
    with pytest.raises(BadRequestError, match="bundle 0 asks for nothing"):
        empty = CreatePlacementGroup(
            group_id="pg_1", job_id=job.job_id, bundles=(Bundle(resources={}),)
        )
        await create(client, empty)
    with pytest.raises(BadRequestError, match="group_id"):
        await create(client, a_group(job.job_id, "group 1"))
    with pytest.raises(NotFoundError, match="job_9"):
        await create(client, a_group("job_9"))
    for call in (get, remove):
        with pytest.raises(NotFoundError, match="no placement group"):
            await call(client, "pg_9")


@asynccontextmanager
async def one_life(database_url: str) -> AsyncIterator[tuple[Client, FakeScheduler]]:
    async with gcs(database_url) as (_, client), scheduler(client) as fake:
        yield client, fake


async def test_groups_outlive_the_gcs(sqlite_url: str) -> None:
    async with one_life(sqlite_url) as (client, fake):
        for node_id in ("n_1", "n_2"):
            await register(client, node_id)
        job = await attach(client)
        await create(client, a_group(job.job_id, "pg_placed"))
        placed = await get(client, "pg_placed", wait_s=30)
        fake.held_back.clear()
        await create(client, a_group(job.job_id, "pg_waits"))

        async def asked() -> bool:
            return any(one.group_id == "pg_waits" for one in fake.gangs)

        await eventually(asked, "the scheduler is asked for the group")
    async with one_life(sqlite_url) as (client, _):
        assert await get(client, "pg_placed") == placed
        assert (await get(client, "pg_waits", wait_s=30)).state is GroupState.CREATED
