"""The event log says who changed what, from where; and what was refused, without being filled by it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import ForbiddenError, StokerError, UnauthorizedError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.control import (
    Author,
    CreateToken,
    Event,
    KvPut,
    KvReply,
    Page,
    PersonRole,
    Token,
)
from stoker_wire.messages.events import EventKind, Refusals, payload_of
from stoker_wire.messages.work import AttachDriver, Job, SubmitJob
from tests.contract.gcs_support import eventually, register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running

HERE = "127.0.0.1"


class People:
    """Clients of people of one gcs, whom the cluster's secret has made tokens."""

    def __init__(self, running: Running, root: Client, stack: AsyncExitStack) -> None:
        self.running, self.root, self._stack = running, root, stack

    async def add(self, name: str, role: str = "user") -> tuple[Client, Token]:
        body = CreateToken(name=name, role=PersonRole(role))
        token = await self.root.call("POST", "/v1/tokens", body, reply=Token)
        return await self.client(token.secret), token

    async def client(self, token: str) -> Client:
        made = Client(self.running.url, token=token, peer="test", timeout_s=30.0)
        return await self._stack.enter_async_context(made)

    async def events(self, client: Client | None = None, **query: Any) -> list[Event]:
        asked = client or self.root
        page = await asked.call("GET", "/v1/events", reply=Page[Event], query=query)
        return list(page.items)


@pytest.fixture
async def people(served: tuple[Running, Client]) -> AsyncIterator[People]:
    async with AsyncExitStack() as stack:
        yield People(*served, stack)


async def test_what_a_person_changes_names_the_person_the_token_and_the_address(
    people: People,
) -> None:
    await register(people.root)
    alice, alices = await people.add("alice")
    admin, admins = await people.add("ann", role="admin")
    job = await alice.call("POST", "/v1/jobs", SubmitJob(entrypoint="true"), reply=Job)
    await alice.call("PUT", "/v1/kv/alice/a", KvPut(key="a", value=b"1"), reply=KvReply)
    await admin.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
    await admin.call("POST", "/v1/nodes/n_1/cordon")
    await admin.call("POST", "/v1/queues", {"name": "q"})
    await admin.call("DELETE", f"/v1/tokens/{alices.token_id}")
    by_alice = Author(name="alice", role="user", token_id=alices.token_id, address=HERE)
    by_ann = Author(name="ann", role="admin", token_id=admins.token_id, address=HERE)
    by_root = Author(name="cluster", role="admin", address=HERE)
    made = {(event.kind, event.by) for event in await people.events(limit=1000)}
    assert made >= {
        (EventKind.NODE_REGISTERED, by_root),
        (EventKind.TOKEN_CREATED, by_root),
        (EventKind.JOB_SUBMITTED, by_alice),
        (EventKind.KV_PUT, by_alice),
        (EventKind.JOB_FINISHED, by_ann),
        (EventKind.NODE_CORDONED, by_ann),
        (EventKind.QUEUE_CREATED, by_ann),
        (EventKind.TOKEN_REVOKED, by_ann),
    }
    for event in await people.events(limit=1000):
        payload_of(event)
        assert "@by" not in event.payload
    filtered = await people.events(by="ann", limit=1000)
    assert {event.by for event in filtered} == {by_ann}
    assert len(await people.events(by="ann,alice", kind="job.", limit=1000)) == 2


async def test_what_a_job_does_is_its_jobs_and_of_other_people_a_user_learns_nothing(
    people: People,
) -> None:
    await register(people.root)
    alice, _ = await people.add("alice")
    bob, _ = await people.add("bob", role="admin")
    body = AttachDriver(pid=7, hostname="here", namespace="alice")
    job = await alice.call("POST", "/v1/jobs/attach", body, reply=Job)
    driver = await people.client(job.token)
    await driver.call("PUT", "/v1/kv/alice/a", KvPut(key="a", value=b"1"), reply=KvReply)
    await bob.call("POST", "/v1/nodes/n_1/cordon")
    await bob.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
    seen = {event.kind: event.by for event in await people.events(alice, limit=1000)}
    started = seen[EventKind.JOB_STARTED]
    assert started is not None and started.name == "alice"
    assert seen[EventKind.KV_PUT] is None
    assert seen[EventKind.NODE_CORDONED] is None and seen[EventKind.JOB_FINISHED] is None
    assert await people.events(alice, by="bob") == []
    assert EventKind.TOKEN_CREATED not in seen
    auditor, _ = await people.add("vera", role="viewer")
    assert {e.by.name for e in await people.events(auditor, by="bob") if e.by} == {"bob"}

    async def watched(client: Client) -> Event:
        async for event in client.watch("/v1/events", 0, {"kind": EventKind.NODE_CORDONED}):
            if event.kind == EventKind.NODE_CORDONED:
                return event
        raise AssertionError

    assert (await watched(alice)).by is None
    assert (await watched(auditor)).by is not None


async def test_refused_requests_are_written_together_and_name_who_sent_them(
    people: People,
) -> None:
    alice, token = await people.add("alice")
    for _ in range(20):
        with pytest.raises(ForbiddenError):
            await alice.call("POST", "/v1/queues", {"name": "q"})
        with pytest.raises(UnauthorizedError):
            await (await people.client("guessed")).call("GET", "/v1/jobs")

    async def are_written() -> bool:
        return len(await people.events(kind="audit.")) == 2

    await eventually(are_written, "the refusals are in the log")
    await asyncio.sleep(0.2)
    found = {event.subject: event for event in await people.events(kind="audit.")}
    known, unknown = found["user alice"], found[HERE]
    assert known.by == Author(name="alice", role="user", token_id=token.token_id, address=HERE)
    assert unknown.by == Author(name="", address=HERE)
    for event in (known, unknown):
        refusals = payload_of(event)
        assert isinstance(refusals, Refusals) and refusals.count == 20
    assert payload_of(known).route == "POST /v1/queues"  # type: ignore[union-attr]
    assert "is not for user alice" in payload_of(known).message  # type: ignore[union-attr]
    assert "guessed" not in str(unknown.payload)
    assert await people.events(alice, kind="audit.") == []
    with pytest.raises(StokerError):
        await alice.call("GET", "/v1/tokens")
    assert len(await people.events(kind="audit.")) == 2, "the next are written a minute later"
