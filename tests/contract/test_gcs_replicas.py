"""Several gcs on one database, and a gcs that dies, restarts, or loses Redis."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_wire.errors import ConflictError, StokerError, UnavailableError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import Demand, Heartbeat, Node, NodeState
from stoker_wire.messages.control import Campaign, Event, KvEntry, Leader, Page
from stoker_wire.messages.work import (
    Actor,
    CreateActor,
    Job,
    JobState,
    ReportTasks,
    SubmitJob,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import (
    PATIENT,
    TOKEN,
    attach,
    eventually,
    gcs,
    migrate,
    register,
    scheduler,
)
from tests.services import ReservedPort

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services import PostgresServer, RedisServer

SUSPICIOUS = msgspec.structs.replace(PATIENT, suspect_after_s=4.0)


async def collect(client: Client, count: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    async for event in client.watch("/v1/events", 0, {"kind": "kv."}):
        found.append((event.seq, event.subject))
        if len(found) == count:
            break
    return found


async def test_a_page_at_one_replica_hears_of_tasks_that_the_other_was_told(
    postgres_url: str,
) -> None:
    await migrate(postgres_url)
    async with gcs(postgres_url) as (_, a), gcs(postgres_url) as (_, b):
        job = await attach(a)

        async def heard() -> None:
            async with b.open("GET", "/v1/changes") as response:
                async for line in response.content:
                    if msgspec.json.decode(line, type=Event).payload.get("tasks"):
                        return

        hears = asyncio.create_task(heard())
        states = (TaskState.QUEUED, TaskState.RUNNING, TaskState.FINISHED)
        numbers = itertools.count()

        async def told() -> bool:
            number = next(numbers)
            record = TaskRecord(
                task_id=f"t_{number}",
                attempt=0,
                job_id=job.job_id,
                state=states[number % len(states)],
                name="f",
            )
            body = ReportTasks(records=(record,))
            await a.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)
            await asyncio.sleep(0.1)
            return hears.done()

        await eventually(told, "the page at the other replica hears of tasks")
        await hears


@pytest.mark.parametrize("bus", ["sql", "redis"])
async def test_two_replicas_see_the_same_events_in_the_same_order(
    postgres_url: str, request: pytest.FixtureRequest, bus: str
) -> None:
    await migrate(postgres_url)
    redis_url = request.getfixturevalue("redis_url") if bus == "redis" else None
    async with (
        gcs(postgres_url, redis_url, settings=SUSPICIOUS) as (one, a),
        gcs(postgres_url, redis_url, settings=SUSPICIOUS) as (two, b),
    ):
        watches = [asyncio.ensure_future(collect(client, 200)) for client in (a, b)]

        async def writes(client: Client, name: str) -> None:
            for i in range(100):
                await client.call("PUT", f"/v1/kv/ns/{name}{i}", b"v", reply=KvEntry)

        await asyncio.gather(writes(a, "a"), writes(b, "b"))
        async with asyncio.timeout(60):
            seen_a, seen_b = await asyncio.gather(*watches)
        assert seen_a == seen_b
        seqs = [seq for seq, _ in seen_a]
        assert seqs == sorted(set(seqs))
        assert {subject for _, subject in seen_a} == {
            f"ns/{name}{i}" for name in "ab" for i in range(100)
        }
        assert (one.leads, two.leads).count(True) == 1


class Listener:
    """A leader's host, which takes connections and answers if it is to."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self.url = ""

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if self._answers:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        else:
            await reader.read()
        writer.close()


async def campaign(client: Client, holder: str, url: str, ttl_s: float) -> Leader:
    body = Campaign(holder=holder, url=url, ttl_s=ttl_s)
    return await client.call("POST", "/v1/leaders/scheduler", body, reply=Leader)


async def test_a_leader_that_renews_late_is_replaced_only_if_it_does_not_answer(
    client: Client,
) -> None:
    async with Listener(answers=True) as busy, Listener(answers=False) as frozen:
        first = await campaign(client, "busy", busy.url, 0.001)
        await asyncio.sleep(0.01)
        for _ in range(3):
            with pytest.raises(ConflictError, match=r"(?s)busy at .* leads.*late.* and answers"):
                await campaign(client, "other", frozen.url, 60.0)
        late = await campaign(client, "busy", busy.url, 0.001)
        assert late.epoch == first.epoch, "nobody else has led"
        await asyncio.sleep(0.01)
        then = await campaign(client, "other", frozen.url, 0.0001)
        assert then.epoch == late.epoch + 1, "not for ever: another period has passed"
        await asyncio.sleep(0.01)
        again = await campaign(client, "busy", busy.url, 60.0)
        assert again.epoch == then.epoch + 1, "the frozen one says nothing"


async def test_the_follower_accepts_work_hears_nodes_and_takes_over(postgres_url: str) -> None:
    await migrate(postgres_url)
    async with gcs(postgres_url, settings=SUSPICIOUS) as (first, a):

        async def leads() -> bool:
            return first.leads

        await eventually(leads, "the first replica leads")
        async with gcs(postgres_url, settings=SUSPICIOUS) as (second, b), scheduler(a) as fake:
            assert not second.leads
            job = await attach(b)
            session = await b.ws(f"/v1/jobs/{job.job_id}/session")
            demand = Demand(job_id=job.job_id, resources={"CPU": 1.0})
            body = CreateActor(actor_id="a_1", demand=demand, class_name="C", payload=b"")
            await b.call("POST", "/v1/actors", body, reply=Actor)

            async def is_placed() -> bool:
                return bool((await b.call("GET", "/v1/actors/a_1", reply=Actor)).lease_id)

            await eventually(is_placed, "the leader places what the follower accepted")
            assert len(fake.requests) == 1
            node = await register(b)
            beat = Heartbeat(incarnation=node.incarnation)
            loop = asyncio.get_running_loop()
            until = loop.time() + SUSPICIOUS.suspect_after_s * 1.5
            while loop.time() < until:
                await b.call("POST", "/v1/nodes/n_1/heartbeat", beat)
                await asyncio.sleep(0.2)
            states = {
                client: await client.call("GET", "/v1/nodes/n_1", reply=Node) for client in (a, b)
            }
            assert {found.state for found in states.values()} == {NodeState.ALIVE}
            query = {"kind": "node.suspected"}
            page = await a.call("GET", "/v1/events", query=query, reply=Page[Event])
            assert page.items == ()
            assert (await a.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)).state == "RUNNING"
            await first.stop(0.2)

            async def took_over() -> bool:
                return second.leads

            await eventually(took_over, "the follower leads")
            await session.close()


@pytest.mark.logs(r"Redis does not answer")
async def test_redis_may_be_gone_while_the_gcs_goes_on(
    sqlite_url: str, own_redis: RedisServer
) -> None:
    async with gcs(sqlite_url, own_redis.url, settings=SUSPICIOUS) as (running, client):
        node = await register(client)
        beat = Heartbeat(incarnation=node.incarnation)

        async def degraded_is(wanted: bool) -> bool:
            await client.call("POST", "/v1/nodes/n_1/heartbeat", beat)
            return running.app.ephemeral.degraded is wanted

        await eventually(lambda: degraded_is(False), "Redis is used")
        own_redis.stop()
        await eventually(lambda: degraded_is(True), "the loss is noticed")
        await client.call("GET", "/readyz", raw=True)
        await client.call("PUT", "/v1/kv/ns/k", b"v", reply=KvEntry)

        async def told() -> bool:
            metrics = await client.call("GET", "/metrics", raw=True)
            return b"stoker_redis_up 0" in metrics

        await eventually(told, "the metric says so")
        await asyncio.to_thread(own_redis.start)
        await eventually(lambda: degraded_is(False), "Redis is used again")
        found = await client.call("GET", "/v1/nodes/n_1", reply=Node)
        assert found.state is NodeState.ALIVE


async def test_redis_may_be_emptied_and_no_node_or_driver_is_blamed(
    postgres_url: str, own_redis: RedisServer
) -> None:
    await migrate(postgres_url)
    settings = msgspec.structs.replace(
        SUSPICIOUS, driver_reconnect_s=2.0, restart_reconnect_s=2.0, dead_after_s=6.0
    )
    async with (
        gcs(postgres_url, own_redis.url, settings=settings) as (one, a),
        gcs(postgres_url, own_redis.url, settings=settings) as (two, b),
    ):
        follower = a if two.leads else b
        job = await attach(follower)
        session = await follower.ws(f"/v1/jobs/{job.job_id}/session")
        node = await register(follower)
        beat = Heartbeat(incarnation=node.incarnation)
        loop = asyncio.get_running_loop()
        until = loop.time() + settings.dead_after_s * 1.5
        while loop.time() < until:
            await asyncio.to_thread(own_redis.flush)
            for _ in range(4):
                await follower.call("POST", "/v1/nodes/n_1/heartbeat", beat)
                await asyncio.sleep(0.2)
        for kind in ("node.suspected", "node.died", "job.finished"):
            page = await a.call("GET", "/v1/events", query={"kind": kind}, reply=Page[Event])
            assert page.items == (), kind
        for running in (one, two):
            kept = await running.app.ephemeral.all("heartbeats")
            assert set(kept) == {"n_1"} and not running.app.ephemeral.degraded
        found = await a.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)
        assert found.state is JobState.RUNNING
        await session.close()


async def test_a_restart_resumes_placement_and_gives_drivers_time(sqlite_url: str) -> None:
    settings = msgspec.structs.replace(PATIENT, restart_reconnect_s=3.0)
    async with gcs(sqlite_url, settings=settings) as (_, client):
        back, lost = await attach(client), await attach(client)
        demand = Demand(job_id=back.job_id, resources={"CPU": 1.0})
        body = CreateActor(actor_id="a_1", demand=demand, class_name="C", payload=b"")
        await client.call("POST", "/v1/actors", body, reply=Actor)
        await client.call("POST", "/v1/jobs", SubmitJob(entrypoint="x", job_id="job_x"), reply=Job)
    async with gcs(sqlite_url, settings=settings) as (_, client), scheduler(client):
        session = await client.ws(f"/v1/jobs/{back.job_id}/session")

        async def resumed() -> bool:
            actor = await client.call("GET", "/v1/actors/a_1", reply=Actor)
            job = await client.call("GET", "/v1/jobs/job_x", reply=Job)
            return bool(actor.lease_id and job.lease_id)

        await eventually(resumed, "placement goes on after the restart")
        query = {"wait_s": 30}
        gone = await client.call("GET", f"/v1/jobs/{lost.job_id}", query=query, reply=Job)
        assert gone.state is JobState.FAILED
        kept = await client.call("GET", f"/v1/jobs/{back.job_id}", reply=Job)
        assert kept.state is JobState.RUNNING
        await session.close()


async def test_kill_9_loses_nothing_that_was_acknowledged(sqlite_url: str, tmp_path: Path) -> None:
    port = ReservedPort()
    command = [
        sys.executable, "-m", "stoker_gcs",
        "--database-url", sqlite_url, "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {**os.environ, "STOKER_TOKEN": TOKEN, "STOKER_LOG_LEVEL": "error"}
    acknowledged: list[str] = []
    enough = asyncio.Event()

    async def write(client: Client, worker: int) -> None:
        for i in range(100_000):
            name = f"w{worker}.{i}"
            try:
                await client.call("PUT", f"/v1/kv/ns/{name}", b"v", reply=KvEntry, retry=False)
            except StokerError:
                return
            acknowledged.append(name)
            if len(acknowledged) >= 300:
                enough.set()

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*command, env=environment)

    process = await start()
    async with Client(f"http://127.0.0.1:{port}", token=TOKEN, peer="test") as client:
        try:
            await client.call("GET", "/readyz", raw=True, timeout_s=40)
            writers = [asyncio.ensure_future(write(client, worker)) for worker in range(8)]
            async with asyncio.timeout(60):
                await enough.wait()
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.gather(*writers)
            process = await start()
            await client.call("GET", "/readyz", raw=True, timeout_s=40)
            kept: set[str] = set()
            cursor = ""
            while True:
                query = {"limit": 1000, "cursor": cursor}
                page = await client.call("GET", "/v1/kv/ns", query=query, reply=Page[KvEntry])
                kept.update(entry.key for entry in page.items)
                cursor = page.next_cursor
                if not cursor:
                    break
            assert set(acknowledged) <= kept
            query = {"kind": "kv.", "limit": 1000}
            events = await client.call("GET", "/v1/events", query=query, reply=Page[Event])
            assert len(events.items) == len(kept) or events.next_cursor, "row and event are one"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(40):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.logs(r"the database .* (does not answer|is starting or stopping)")
async def test_postgres_may_go_and_come_back(own_postgres: PostgresServer) -> None:
    url = own_postgres.url(own_postgres.create_database())
    await migrate(url)
    async with gcs(url, settings=SUSPICIOUS) as (running, client):
        await client.call("PUT", "/v1/kv/ns/before", b"v", reply=KvEntry)
        candidate = Campaign(holder="p_1", url="http://127.0.0.1:9", ttl_s=0.1)
        elected = await client.call("POST", "/v1/leaders/scheduler", candidate, reply=Leader)
        await asyncio.to_thread(own_postgres.stop)
        # Nobody can be elected meanwhile: it leads on, and is found by those who look for it.
        found = await client.call("GET", "/v1/leaders/scheduler", reply=Leader, retry=False)
        assert (found.holder, found.epoch) == ("p_1", elected.epoch)
        for method, body in (("PUT", b"v"), ("GET", None)):
            with pytest.raises(UnavailableError, match="does not answer"):
                await client.call(method, "/v1/kv/ns/during", body, raw=True, retry=False)
        await asyncio.to_thread(own_postgres.start)
        await client.call("PUT", "/v1/kv/ns/after", b"v", reply=KvEntry)
        page = await client.call("GET", "/v1/kv/ns", reply=Page[KvEntry])
        assert [entry.key for entry in page.items] == ["after", "before"]

        async def leads() -> bool:
            return running.leads

        await eventually(leads, "it leads again")
        watch = client.watch("/v1/events", 0, {"kind": "kv."})
        assert [(await anext(watch)).subject for _ in range(2)] == ["ns/before", "ns/after"]
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_leader_that_a_silent_database_cannot_name_is_asked_for_again(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gcs.controllers.leader_election._LOOKUP_S", 0.1)
    async with gcs(sqlite_url) as (running, client):

        async def silent(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(running.app.state.store, "get", silent)
        with pytest.raises(UnavailableError, match="the database does not answer") as error:
            await client.call("GET", "/v1/leaders/scheduler", reply=Leader, retry=False)
        assert error.value.retryable


@pytest.mark.logs(r"not ready")
async def test_a_replica_without_its_database_is_not_ready(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(postgres_url)
    async with gcs(postgres_url) as (running, client):
        store = running.app.state.store
        bounds, frozen = store.bounds, asyncio.Event()

        async def gone() -> tuple[int, int]:
            raise UnavailableError("the database is gone")

        async def silent() -> tuple[int, int]:
            await frozen.wait()
            return await bounds()

        async def readiness() -> str:
            try:
                await client.call("GET", "/readyz", raw=True, retry=False)
            except UnavailableError as error:
                return error.message
            return ""

        for fault in (gone, silent):
            monkeypatch.setattr(store, "bounds", fault)

            async def told() -> bool:
                said = await readiness()
                assert "is gone" not in said, "details are for the log"
                return "its database does not answer" in said

            await eventually(told, "/readyz says why")
            monkeypatch.setattr(store, "bounds", bounds)

            async def is_ready() -> bool:
                return not await readiness()

            await eventually(is_ready, "it serves again")
