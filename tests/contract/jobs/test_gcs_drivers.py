"""When a driver counts as dead: its connection, its process and its replica may be silent for a while."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.registry.jobs.driver_processes import DriverProcesses, Seen
from stoker_wire.http.client.client import Client
from stoker_wire.messages.work import SESSION_BEAT_S, AttachDriver, Job, JobState
from stoker_wire.process.host_identity import pid_namespace, start_time
from tests.contract.gcs_support import PATIENT, TOKEN, eventually, gcs, migrate
from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import aiohttp
    import pytest

    from tests.services import RedisServer

SHORT = msgspec.structs.replace(
    PATIENT, driver_reconnect_s=0.5, driver_unreachable_s=1.0, restart_reconnect_s=1.0
)


@contextmanager
def a_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that may stand for a driver's."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def attach(client: Client, process: subprocess.Popen[bytes] | None) -> Job:
    body = AttachDriver(pid=7, hostname="elsewhere")
    if process is not None:
        body = AttachDriver(
            pid=process.pid,
            hostname=socket.gethostname(),
            pid_started=start_time(process.pid),
            pid_namespace=pid_namespace(),
        )
    return await client.call("POST", "/v1/jobs/attach", body, reply=Job)


async def state_after(client: Client, job: Job, seconds: float) -> JobState:
    """Return the state of a job that had so long to end."""
    query = {"wait_s": seconds}
    found = await client.call("GET", f"/v1/jobs/{job.job_id}", query=query, reply=Job)
    return found.state


async def end_of(client: Client, job: Job) -> str:
    query = {"wait_s": 30}
    ended = await client.call("GET", f"/v1/jobs/{job.job_id}", query=query, reply=Job)
    assert ended.state is JobState.FAILED
    return ended.message


async def session_of(client: Client, job: Job) -> aiohttp.ClientWebSocketResponse:
    return await client.ws(f"/v1/jobs/{job.job_id}/session", heartbeat_s=None)


async def test_a_driver_whose_process_runs_may_lose_its_session_until_the_process_ends(
    sqlite_url: str,
) -> None:
    with a_process() as process:
        async with gcs(sqlite_url, settings=SHORT) as (_, client):
            job = await attach(client, process)
            await (await session_of(client, job)).close()
            assert await state_after(client, job, 3.0) is JobState.RUNNING
        async with gcs(sqlite_url, settings=SHORT) as (_, client):
            assert await state_after(client, job, 3.0) is JobState.RUNNING, "after a restart too"
            process.kill()
            process.wait()
            message = await end_of(client, job)
    assert message == (
        f"driver died: its process {process.pid} on {socket.gethostname()} is gone, without a finish"
    )


async def test_a_process_that_ended_counts_although_its_connection_is_held_open(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gcs.registry.jobs.sessions.SILENT_S", 1.0)
    with a_process() as process:
        async with gcs(sqlite_url, settings=SHORT) as (_, client):
            job = await attach(client, process)
            session = await session_of(client, job)  # as a child of the driver may hold it
            assert await state_after(client, job, 3.0) is JobState.RUNNING
            process.kill()
            process.wait()
            assert "is gone" in await end_of(client, job)
            await session.close()


async def test_a_driver_that_does_not_answer_has_as_long_as_the_setting_says(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gcs.registry.jobs.sessions.SILENT_S", 1.0)
    impatient = msgspec.structs.replace(SHORT, driver_unresponsive_s=4.0)
    with a_process() as process:
        async with gcs(sqlite_url, settings=impatient) as (_, client):
            silent, talks = await attach(client, process), await attach(client, process)
            sessions = [await session_of(client, job) for job in (silent, talks)]

            async def beat() -> None:
                while True:
                    await sessions[1].send_str("")
                    await asyncio.sleep(SESSION_BEAT_S / 4)

            beats = asyncio.ensure_future(beat())
            message = await end_of(client, silent)
            assert message.startswith("driver died: its process has not answered for")
            assert "STOKER_DRIVER_UNRESPONSIVE_S" in message
            assert await state_after(client, talks, 0.0) is JobState.RUNNING
            beats.cancel()
            for session in sessions:
                await session.close()


async def test_a_driver_that_was_seen_running_outlives_a_moment_in_which_nobody_can_look(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Seen] = []

    async def look(_self: DriverProcesses, _job: Job) -> Seen:
        # As with a nodelet that starts again, and much later is gone for good.
        looks.append(Seen.UNSEEN if len(looks) in (4, 5) or len(looks) > 8 else Seen.RUNNING)
        return looks[-1]

    monkeypatch.setattr(DriverProcesses, "look", look)
    monkeypatch.setattr("stoker_gcs.registry.jobs.sessions.LOOK_S", 0.5)
    settings = msgspec.structs.replace(SHORT, driver_reconnect_s=4.0)
    async with gcs(sqlite_url, settings=settings) as (_, client):
        job = await attach(client, None)
        await (await session_of(client, job)).close()
        assert "its session ended" in await end_of(client, job)
        assert len(looks) > 10


async def test_a_driver_that_is_cut_off_with_its_nodelet_has_as_long_as_a_cut_may_last(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [Seen.CUT_OFF]

    async def look(_self: DriverProcesses, _job: Job) -> Seen:
        return seen[-1]

    monkeypatch.setattr(DriverProcesses, "look", look)
    settings = msgspec.structs.replace(SHORT, driver_unreachable_s=600.0)
    async with gcs(sqlite_url, settings=settings) as (_, client):
        job = await attach(client, None)
        await (await session_of(client, job)).close()
        assert await state_after(client, job, 3.0) is JobState.RUNNING
        seen.append(Seen.UNSEEN)  # its node is dead
        assert "its session ended" in await end_of(client, job)


async def test_a_driver_of_which_nobody_can_tell_has_longer_if_it_was_silent_before(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gcs.registry.jobs.sessions.SILENT_S", 1.0)
    settings = msgspec.structs.replace(SHORT, driver_unreachable_s=600.0)
    async with gcs(sqlite_url, settings=settings) as (_, client):
        told = await attach(client, None)
        session = await session_of(client, told)
        await session.close()
        assert "its session ended" in await end_of(client, told)
        cut_off = await attach(client, None)
        session = await session_of(client, cut_off)
        assert await state_after(client, cut_off, 2.5) is JobState.RUNNING
        await session.close()
        assert await state_after(client, cut_off, 3.0) is JobState.RUNNING


@asynccontextmanager
async def a_replica(
    postgres_url: str, redis_url: str, **settings: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """A gcs in a process of its own, on shared stores."""
    port = ReservedPort()
    command = [sys.executable, "-m", "stoker_gcs", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--database-url", postgres_url, "--redis-url", redis_url]
    given = {f"STOKER_{name.upper()}": str(value) for name, value in settings.items()}
    environment = {**os.environ, "STOKER_TOKEN": TOKEN, "STOKER_LOG_LEVEL": "error", **given}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        async with Client(f"http://127.0.0.1:{port}", token=TOKEN, peer="test") as client:
            await client.call("GET", "/readyz", raw=True, timeout_s=60)
            yield process, client
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        await process.wait()


async def test_a_replica_that_is_frozen_costs_no_driver_its_job(
    postgres_url: str, own_redis: RedisServer
) -> None:
    await migrate(postgres_url)
    settings: dict[str, Any] = {"driver_reconnect_s": 0.5, "leader_ttl_s": 1.5}
    async with (
        a_replica(postgres_url, own_redis.url, **settings) as (frozen, one),
        a_replica(postgres_url, own_redis.url, **settings) as (_, other),
    ):
        with a_process() as process:
            unseen, seen = await attach(one, None), await attach(one, process)
            sessions = [await session_of(one, job) for job in (unseen, seen)]
            await asyncio.sleep(2 * SESSION_BEAT_S)  # the entries are in Redis
            frozen.send_signal(signal.SIGSTOP)
            # The verdict of before came after 3.5 s.
            assert await state_after(other, unseen, 12.0) is JobState.RUNNING
            assert await state_after(other, seen, 0.0) is JobState.RUNNING
            moved = await session_of(other, unseen)
            frozen.send_signal(signal.SIGCONT)
            await moved.close()
            for session in sessions:
                await session.close()

            async def ended() -> bool:
                return await state_after(other, unseen, 1.0) is JobState.FAILED

            await eventually(ended, "a driver that leaves is dead all the same")
