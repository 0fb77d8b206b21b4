"""Queues over real HTTP and every store: a tree that is always sound, and the jobs that wait in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    NameTakenError,
    NotFoundError,
    StokerError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.control import CreateToken, Event, Page, Token
from stoker_wire.messages.queues import (
    ChangeQueue,
    CreateQueue,
    Queue,
    SetQueues,
    SetQueuesReply,
)
from stoker_wire.messages.work import AttachDriver, FinishJob, Job, JobState, SubmitJob
from tests.contract.gcs_support import eventually, register

if TYPE_CHECKING:
    from stoker_gcs.service import Running
    from tests.contract.gcs_support import FakeScheduler


async def create(client: Client, name: str, **options: Any) -> Queue:
    body = CreateQueue(name=name, **options)
    return await client.call("POST", "/v1/queues", body, reply=Queue)


async def change(client: Client, name: str, **options: Any) -> Queue:
    return await client.call("PATCH", f"/v1/queues/{name}", ChangeQueue(**options), reply=Queue)


async def remove(client: Client, name: str) -> Queue:
    return await client.call("DELETE", f"/v1/queues/{name}", reply=Queue)


async def names(client: Client) -> list[str]:
    page = await client.call("GET", "/v1/queues", reply=Page[Queue])
    return [queue.name for queue in page.items]


async def attach(client: Client, **options: Any) -> Job:
    return await client.call("POST", "/v1/jobs/attach", AttachDriver(pid=7, **options), reply=Job)


async def test_queues_are_made_changed_listed_and_removed(stored: Client) -> None:
    assert (await stored.call("GET", "/v1/queues/default", reply=Queue)).weight == 1.0
    made = await create(stored, "team", weight=3.0, quota={"GPU": 8.0})
    assert await create(stored, "team", weight=3.0, quota={"GPU": 8.0}) == made, "the same again"
    with pytest.raises(NameTakenError):
        await create(stored, "team")
    await create(stored, "team.a", parent="team", limit={"CPU": 4.0})
    changed = await change(stored, "team", stopped=True, quota={})
    assert (changed.weight, changed.quota, changed.stopped) == (3.0, {}, True)
    assert (await change(stored, "default", weight=2.0)).name == "default"
    assert await names(stored) == ["default", "team", "team.a"]
    below = await stored.call("GET", "/v1/queues", reply=Page[Queue], query={"parent": "team"})
    assert [queue.name for queue in below.items] == ["team.a"]
    with pytest.raises(ConflictError, match=r"queues below it: team\.a"):
        await remove(stored, "team")
    await remove(stored, "team.a")
    await remove(stored, "team")
    with pytest.raises(NotFoundError):
        await remove(stored, "team")
    await remove(stored, "default")
    assert (await stored.call("GET", "/v1/queues/default", reply=Queue)).weight == 1.0
    events = await stored.call("GET", "/v1/events", reply=Page[Event], query={"kind": "queue."})
    assert [(event.kind.partition(".")[2], event.subject) for event in events.items] == [
        ("created", "team"),
        ("created", "team.a"),
        ("changed", "team"),
        ("created", "default"),
        ("removed", "team.a"),
        ("removed", "team"),
        ("removed", "default"),
    ]


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"name": "a b"}, "name", ""),
        ({"name": "x", "parent": "tema"}, "parent", "did you mean 'team'"),
        ({"name": "x", "weight": 0.0}, "weight", ""),
        ({"name": "x", "quota": {"GPU": -1.0}}, "quota", ""),
        ({"name": "x", "rate_limit": -1.0}, "rate_limit", ""),
        ({"name": "x", "quota": {"CPU": 2.0}, "limit": {"CPU": 1.0}}, "quota.CPU", "limit of 1"),
        ({"name": "x", "quota": {"CPU": 4.5}}, "quota.CPU", "more than all that the cluster has"),
        ({"name": "x", "quota": {"TPU": 1.0}}, "quota.TPU", "pass force"),
        (
            {"name": "x", "parent": "team", "quota": {"CPU": 3.0}},
            "quota.CPU",
            "more than the quota of queue 'team', 2",
        ),
    ],
)
async def test_a_queue_that_makes_no_sense_is_refused_with_the_field(
    client: Client, options: dict[str, Any], field: str, says: str
) -> None:
    await register(client)  # a node of 4 CPUs
    await create(client, "team", quota={"CPU": 2.0})
    with pytest.raises(BadRequestError) as caught:
        await client.call("POST", "/v1/queues", options, reply=Queue)
    assert says in str(caught.value)
    assert caught.value.field is not None and caught.value.field.startswith(field)
    assert await names(client) == ["team"]


async def test_quotas_are_compared_with_those_beside_and_below_and_may_be_forced(
    client: Client,
) -> None:
    await create(client, "early", quota={"CPU": 100.0})
    await remove(client, "early")
    await register(client)
    await create(client, "a", quota={"CPU": 3.0})
    with pytest.raises(BadRequestError, match=r"4\.5 CPU for a, b is more than all"):
        await create(client, "b", quota={"CPU": 1.5})
    await create(client, "b", quota={"CPU": 1.5}, force=True)
    await create(client, "a.x", parent="a", quota={"CPU": 2.0})
    with pytest.raises(
        BadRequestError, match=r"2 CPU for a\.x is more than the quota of queue 'a', 1"
    ):
        await change(client, "a", quota={"CPU": 1.0}, force=True)


async def test_a_queue_is_never_below_itself(client: Client) -> None:
    for name, parent in (("a", ""), ("b", "a"), ("c", "b")):
        await create(client, name, parent=parent)
    for name, parent in (("a", "a"), ("a", "c"), ("b", "c")):
        with pytest.raises(BadRequestError, match="below itself") as caught:
            await change(client, name, parent=parent)
        assert caught.value.field == "parent"


async def test_two_changes_at_once_never_make_a_circle(stored: Client) -> None:
    for name in ("a", "b"):
        await create(stored, name)
    for _ in range(10):
        moves = (change(stored, "a", parent="b"), change(stored, "b", parent="a"))
        results = await asyncio.gather(*moves, return_exceptions=True)
        assert sum(isinstance(result, Queue) for result in results) == 1, results
        assert all(isinstance(result, (Queue, StokerError)) for result in results), results
        for name in ("a", "b"):
            await change(stored, name, parent="")


async def test_all_queues_are_set_at_once_or_none(stored: Client) -> None:
    async def set_all(*queues: CreateQueue) -> SetQueuesReply:
        body = SetQueues(queues=queues)
        return await stored.call("PUT", "/v1/queues", body, reply=SetQueuesReply)

    first = await set_all(CreateQueue(name="b", parent="a"), CreateQueue(name="a"))
    assert first == SetQueuesReply(created=("b", "a"))
    same = await set_all(CreateQueue(name="b", parent="a"), CreateQueue(name="a"))
    assert same == SetQueuesReply()
    with pytest.raises(BadRequestError, match="below itself"):
        await set_all(CreateQueue(name="b", parent="a"), CreateQueue(name="a", parent="b"))
    with pytest.raises(BadRequestError, match="there twice"):
        await set_all(CreateQueue(name="a"), CreateQueue(name="a"))
    moved = await set_all(CreateQueue(name="b"), CreateQueue(name="c"))
    assert moved == SetQueuesReply(created=("c",), changed=("b",), removed=("a",))
    assert await names(stored) == ["b", "c"]


async def test_jobs_are_in_a_queue_that_there_is_and_keep_it(client: Client) -> None:
    await create(client, "team")
    job = await attach(client, queue="team", priority=3)
    assert (job.queue, job.priority, job.user) == ("team", 3, "cluster")
    assert (await attach(client)).queue == "default"
    with pytest.raises(BadRequestError, match="did you mean 'team'") as caught:
        await attach(client, queue="tema")
    assert caught.value.field == "queue"

    async def is_refused() -> bool:
        try:
            await remove(client, "team")
        except ConflictError as error:
            return job.job_id in str(error)
        return False

    assert await is_refused()
    end = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", end, reply=Job)

    async def is_removed() -> bool:
        return not await is_refused()

    await eventually(is_removed, "the queue that nothing is in is removed")


async def test_the_user_of_a_job_is_the_name_of_its_token(served: tuple[Running, Client]) -> None:
    running, client = served
    body = CreateToken(name="ann")
    token = await client.call("POST", "/v1/tokens", body, reply=Token)
    async with Client(running.url, token=token.secret, peer="test") as hers:
        assert (await attach(hers)).user == "ann"


async def test_a_job_that_does_not_start_in_time_fails_with_the_reason(
    client: Client, fake: FakeScheduler
) -> None:
    fake.held_back.clear()
    body = SubmitJob(entrypoint="true", start_deadline_s=1.5)
    job = await client.call("POST", "/v1/jobs", body, reply=Job)
    done = await client.call(
        "GET", f"/v1/jobs/{job.job_id}", reply=Job, query={"wait_s": 30}, timeout_s=60
    )
    assert done.state is JobState.FAILED
    assert done.message.startswith("its driver did not start within its start deadline of 1.5 s")
