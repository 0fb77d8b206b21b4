"""Node filters over real HTTP: kept where they are given, refused with the place where they go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import BadRequestError, ConflictError, NotFoundError
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.events import EventKind, payload_of
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup, GroupStrategy
from stoker_wire.messages.queues import ChangeQueue, CreateQueue, Queue
from stoker_wire.messages.work import (
    FinishJob,
    Job,
    JobState,
    ReportSlowRank,
    SlowRank,
    SubmitJob,
)
from tests.contract.gcs_support import attach, eventually, register

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler

BAD = "labels.rack !! 'r7'"


async def test_a_queue_keeps_a_filter_that_can_be_read(stored: Client) -> None:
    body = CreateQueue(name="team", node_filter="labels.rack != 'r7'")
    made = await stored.call("POST", "/v1/queues", body, reply=Queue)
    assert made.node_filter == body.node_filter
    with pytest.raises(BadRequestError, match="at position 13") as caught:
        await stored.call("PATCH", "/v1/queues/team", ChangeQueue(node_filter=BAD), reply=Queue)
    assert caught.value.field == "node_filter"
    changed = await stored.call(
        "PATCH", "/v1/queues/team", ChangeQueue(node_filter=""), reply=Queue
    )
    assert changed.node_filter == ""


async def test_the_driver_of_a_job_is_requested_with_its_filter(
    client: Client, fake: FakeScheduler
) -> None:
    body = SubmitJob(entrypoint="true", node_filter="free.gpu >= 2")
    job = await client.call("POST", "/v1/jobs", body, reply=Job)

    async def is_requested() -> bool:
        return bool(fake.requests)

    await eventually(is_requested, "the scheduler is asked")
    (request, *_) = fake.requests
    assert request.demand.job_id == job.job_id
    assert request.demand.node_filter == job.node_filter == "free.gpu >= 2"
    with pytest.raises(BadRequestError, match="at position 13"):
        await client.call("POST", "/v1/jobs", SubmitJob(entrypoint="x", node_filter=BAD), reply=Job)


async def test_a_placement_group_with_an_unreadable_filter_is_refused(client: Client) -> None:
    job = await attach(client)
    body = CreatePlacementGroup(
        group_id="pg_1",
        job_id=job.job_id,
        bundles=(Bundle(resources={"CPU": 1.0}, node_filter=BAD),),
        strategy=GroupStrategy.PACK,
    )
    with pytest.raises(BadRequestError) as caught:
        await client.call("POST", "/v1/placement-groups", body, reply=Empty)
    assert caught.value.field == "bundles.0.node_filter"


async def test_a_slow_rank_is_an_event_of_its_node(stored: Client) -> None:
    await register(stored)
    job = await attach(stored)
    body = ReportSlowRank(node_id="n_1", rank=3, ratio=1.7, since_s=5.0, group="dp")
    path = f"/v1/jobs/{job.job_id}/slow-ranks"
    slow = await stored.call("POST", path, body, reply=SlowRank)
    assert slow == SlowRank(
        job_id=job.job_id, node_id="n_1", rank=3, ratio=1.7, since_s=5.0, group="dp"
    )
    page = await stored.call("GET", "/v1/events?kind=rank.", reply=Page[Event])
    (event,) = page.items
    assert (event.kind, event.subject) == (EventKind.RANK_SLOW, "n_1")
    assert payload_of(event) == slow
    unknown = ReportSlowRank(node_id="n_2", rank=3, ratio=1.7, since_s=5.0)
    with pytest.raises(NotFoundError):
        await stored.call("POST", path, unknown, reply=SlowRank)
    ended = FinishJob(state=JobState.SUCCEEDED)
    await stored.call("POST", f"/v1/jobs/{job.job_id}/finish", ended, reply=Job)
    with pytest.raises(ConflictError):
        await stored.call("POST", path, body, reply=SlowRank)
