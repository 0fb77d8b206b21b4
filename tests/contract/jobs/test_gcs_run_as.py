"""The Unix user of a token goes with all jobs that are made by it, and is an admin's to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import BadRequestError, ForbiddenError
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.control import CreateToken, Page, PersonRole, Token, Whoami
from stoker_wire.messages.schedules import CreateSchedule, Schedule
from stoker_wire.messages.work import AttachDriver, Job, JobArray, SubmitJob
from tests.contract.gcs_support import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running

SUBMISSION = SubmitJob(entrypoint="true")


@pytest.fixture
async def alice(served: tuple[Running, Client]) -> AsyncIterator[Client]:
    """A user whose jobs run as a Unix user of another name."""
    running, root = served
    made = await root.call(
        "POST", "/v1/tokens", CreateToken(name="alice", run_as="alice-unix"), reply=Token
    )
    assert made.run_as == "alice-unix"
    async with Client(running.url, token=made.secret, peer="test", timeout_s=30.0) as client:
        yield client


async def test_jobs_of_a_token_have_its_user_and_so_have_theirs(
    served: tuple[Running, Client], alice: Client
) -> None:
    running, root = served
    assert (await alice.call("GET", "/v1/whoami", reply=Whoami)).run_as == "alice-unix"
    attached = await alice.call(
        "POST", "/v1/jobs/attach", AttachDriver(pid=7, hostname="here"), reply=Job
    )
    submitted = await alice.call("POST", "/v1/jobs", SUBMISSION, reply=Job)
    token = TokenSigner(TOKEN).job(submitted.job_id)
    async with Client(running.url, token=token, peer="test", timeout_s=30.0) as process:
        child = await process.call("POST", "/v1/jobs", SUBMISSION, reply=Job)
        assert (await process.call("GET", "/v1/whoami", reply=Whoami)).run_as == "alice-unix"
    array = SubmitJob(entrypoint="true", array=JobArray(indices=(0, 1)))
    await alice.call("POST", "/v1/jobs", array, reply=Job)
    listed = (await alice.call("GET", "/v1/jobs", reply=Page[Job])).items
    assert {attached.job_id, submitted.job_id, child.job_id} < {job.job_id for job in listed}
    assert {job.run_as for job in listed} == {"alice-unix"}
    assert (await root.call("POST", "/v1/jobs", SUBMISSION, reply=Job)).run_as == ""


async def test_runs_of_a_schedule_have_the_user_of_who_made_it(alice: Client) -> None:
    body = CreateSchedule(name="each", cron="* * * * *", job=SUBMISSION)
    made = await alice.call("POST", "/v1/schedules", body, reply=Schedule)
    assert made.run_as == "alice-unix"


@pytest.mark.parametrize(
    ("run_as", "role", "why"),
    [
        ("root", "user", "jobs do not run as root"),
        ("1000", "user", "run_as"),
        ("a b", "user", "run_as"),
        ("-x", "user", "run_as"),
        ("alice", "viewer", "starts no jobs"),
        ("alice", "join", "starts no jobs"),
    ],
)
async def test_a_user_that_no_token_may_name_is_refused(
    client: Client, run_as: str, role: str, why: str
) -> None:
    body = CreateToken(name="x", role=PersonRole(role), run_as=run_as, once=role == "join")
    with pytest.raises(BadRequestError, match=why):
        await client.call("POST", "/v1/tokens", body)


async def test_a_user_makes_no_token_for_another_unix_user(alice: Client) -> None:
    with pytest.raises(ForbiddenError):
        await alice.call("POST", "/v1/tokens", CreateToken(name="alice", run_as="bob"))
