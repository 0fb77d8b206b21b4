"""The scheduler's copy of jobs: what it knows of them, as whom they run, and when an attempt is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_scheduler import jobs as module
from stoker_scheduler.jobs import JobDirectory
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.cluster import Demand, LeaseReply, LeaseRequest
from stoker_wire.messages.work import DETACHED_JOB
from tests.unit.scheduler.fakes import a_job

if TYPE_CHECKING:
    from tests.unit.scheduler.service_setup import Setup


def test_an_attempt_is_new_once_whoever_tells_of_it_first() -> None:
    jobs = JobDirectory()
    assert not jobs.put(a_job("job_1", queue="team")), "its first"
    assert jobs.put(a_job("job_1", queue="team", attempt=2))
    assert not jobs.begin_attempt("job_1", 2)
    assert jobs.begin_attempt("job_1", 3)
    assert not jobs.put(a_job("job_1", queue="team", attempt=3)), "the event of what was asked for"
    assert not jobs.put(a_job("job_1", queue="other", attempt=2)), "one from the past"
    facts = jobs.get("job_1")
    assert facts is not None and facts.attempt == 3


def test_a_job_that_is_first_heard_of_in_a_later_attempt_has_nothing_to_end() -> None:
    jobs = JobDirectory()
    assert not jobs.begin_attempt("job_1", 4)
    assert not jobs.put(a_job("job_1", attempt=4))
    jobs.drop("job_1")
    assert jobs.get("job_1") is None


async def test_a_job_of_which_the_gcs_could_not_say_whether_it_has_ended_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ARRIVAL_S", 0.01)
    answers: list[bool | None] = [None, True, False]

    async def has_ended(_: str) -> bool | None:
        return answers.pop(0)

    jobs = JobDirectory(has_ended)
    assert await jobs.arrival("job_1") is not None and jobs.get("job_1") is None
    assert await jobs.arrival("job_1") is None, "it has ended"
    assert await jobs.arrival("job_2") is not None and jobs.get("job_2") is not None


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
