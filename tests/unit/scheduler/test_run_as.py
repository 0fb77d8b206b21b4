"""As whom a worker runs is the job's: the scheduler says it, and nobody who asks for leases does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.jobs import JobDirectory
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.cluster import Demand, LeaseReply, LeaseRequest
from stoker_wire.messages.work import DETACHED_JOB
from tests.unit.scheduler.fakes import a_job

if TYPE_CHECKING:
    from tests.unit.scheduler.service_setup import Setup


async def test_an_order_has_the_user_of_the_job_whatever_the_request_says(setup: Setup) -> None:
    nodelet = await setup.node(CPU=4)
    setup.gcs.jobs["job_1"] = a_job("job_1", run_as="alice")
    setup.gcs.jobs["job_2"] = a_job("job_2")
    await setup.lead()
    setup.gcs.jobs["job_3"] = a_job("job_3", run_as="carol")  # of which no event has come
    for job_id in ("job_1", "job_2", "job_3"):
        request = LeaseRequest(
            request_id=f"r_{job_id}",
            owner_id="p_1",
            demand=Demand(job_id=job_id, resources={"CPU": 1.0}),
            wait_s=20.0,
            run_as="mallory",
        )
        reply = await setup.client.call("POST", "/v1/leases", request, reply=LeaseReply)
        assert len(reply.granted) == 1
    said = {order.lease.job_id: order.worker.run_as for order in nodelet.orders}
    assert said == {"job_1": "alice", "job_2": "", "job_3": "carol"}


async def test_the_gcs_is_asked_once_about_a_detached_actor_and_no_answer_is_no_user() -> None:
    asked: list[str] = []
    answers: list[str | None] = [None, "alice", "bob"]

    async def find(subject: str) -> str:
        asked.append(subject)
        answer = answers.pop(0)
        if answer is None:
            raise UnavailableError("the gcs is away")
        return answer

    jobs = JobDirectory(find_run_as=find)
    with pytest.raises(UnavailableError):
        await jobs.run_as(DETACHED_JOB, "a_1")
    for _ in range(2):
        assert await jobs.run_as(DETACHED_JOB, "a_1") == "alice"
        assert await jobs.run_as(DETACHED_JOB, "a_2") == "bob"
    assert asked == ["a_1", "a_1", "a_2"]
    jobs.put(a_job("job_1", run_as="carol"))
    assert await jobs.run_as("job_1", "") == "carol"
    assert len(asked) == 3
