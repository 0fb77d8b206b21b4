"""Drivers' sessions: a WebSocket per attached driver; a driver without one is dead.

Any replica may hold a session; the leading one decides. A session is an entry of the ephemeral
store, renewed every second, so a driver may reconnect to another replica, and after a restart of the
gcs all have ``restart_reconnect_s`` to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from typing import TYPE_CHECKING

from aiohttp import ClientError, WSMsgType

from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import StokerError
from stoker_wire.messages.work import FinishJob, JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.server.service import Request
    from stoker_wire.settings import Settings

_log = logging.getLogger(__name__)
SESSIONS = "sessions"
RENEW_S = 1.0
TTL_S = 60.0
CHECK_S = 0.25
SHARED_SLACK_S = 3.0
"""How much later the renewal of another replica may be seen than one of this process."""
_AT = struct.Struct("<d")


class DriverSessions:
    """The sessions that this replica holds, and the check of those of all replicas."""

    def __init__(self, state: StateStore, jobs: JobRegistry, settings: Settings) -> None:
        self._state = state
        self._jobs = jobs
        self._settings = settings
        self._open: dict[str, int] = {}
        self._seen: dict[str, float] = {}

    async def serve(self, req: Request, ws: web.WebSocketResponse) -> None:
        """Hold a session until the driver closes it, dies, or its job ends."""
        job_id = req.path["job_id"]
        row = await self._state.find(JOBS, job_id)
        if row is None:
            await ws.close(code=4404, message=f"there is no job {job_id}".encode()[:120])
            return
        if row.record.state.terminal:
            await ws.close(code=4409, message=f"job is {row.record.state}".encode())
            return
        with self._held(job_id):
            async with asyncio.TaskGroup() as group:
                until_end = group.create_task(self._close_at_end(job_id, ws))
                async for message in ws:
                    if message.type is WSMsgType.ERROR:
                        break
                until_end.cancel()

    async def until_exit(self, req: Request) -> None:
        """Hold a session until the driver's process exits: the last byte of its request is the code.

        A process that is killed sends none, and its job fails like that of any lost session.
        """
        job_id = req.path["job_id"]
        await self._state.get(JOBS, job_id)
        code: list[int] = []

        async def read() -> None:
            with contextlib.suppress(OSError, ClientError, asyncio.IncompleteReadError):
                code.extend(await req.http.content.readexactly(1))

        with self._held(job_id):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read()), group.create_task(req.stopping.wait())]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        if code:
            failed = req.query.message or f"the driver ended with exit code {code[0]}"
            end = FinishJob(
                state=JobState.FAILED if code[0] else JobState.SUCCEEDED,
                exit_code=code[0],
                message=failed if code[0] else "",
            )
            await self._jobs.finish(job_id, end)

    @contextlib.contextmanager
    def _held(self, job_id: str) -> Iterator[None]:
        self._open[job_id] = self._open.get(job_id, 0) + 1
        self._renew(job_id)
        try:
            yield
        finally:
            self._renew(job_id)
            self._open[job_id] -= 1
            if not self._open[job_id]:
                del self._open[job_id]

    async def _close_at_end(self, job_id: str, ws: web.WebSocketResponse) -> None:
        with self._state.log.signal(job_id) as signal:
            while True:
                signal.clear()
                job = await self._state.get(JOBS, job_id)
                if job.state.terminal:
                    text = f"job is {job.state}: {job.message}"
                    await ws.close(code=4410, message=text.encode()[:120])
                    return
                await signal.wait()

    def _renew(self, job_id: str) -> None:
        now = self._state.now()
        self._seen[job_id] = now
        self._state.ephemeral.put(SESSIONS, job_id, _AT.pack(now), TTL_S)

    async def renew(self) -> None:
        """Renew the sessions that this replica holds, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            for job_id in list(self._open):
                self._renew(job_id)
            for job_id in self._seen.keys() - self._jobs.live.keys():
                del self._seen[job_id]

    async def fail_lost(self) -> None:
        """Fail the jobs whose driver is gone, until cancelled; runs on the leading replica."""
        began = self._state.now()
        loop = asyncio.get_running_loop()
        while True:
            last = loop.time()
            await asyncio.sleep(CHECK_S)
            if loop.time() - last - CHECK_S > self._settings.driver_reconnect_s / 2:
                # This process was stopped and could not receive renewals.
                began = self._state.now()
            attached = [
                job
                for job in self._jobs.live.values()
                if not job.submitted and job.state is JobState.RUNNING
            ]
            if not attached:
                continue
            seen = await self._last_renewals()
            now = self._state.now()
            grace_s = self._settings.driver_reconnect_s
            grace_s += SHARED_SLACK_S if self._state.store.shared else 0.0
            for job in attached:
                if job.job_id in self._open:
                    continue
                first = max(began, job.started_at_s or job.created_at_s)
                deadline = first + self._settings.restart_reconnect_s
                if job.job_id in seen:
                    deadline = max(seen[job.job_id] + grace_s, began + grace_s)
                if now > deadline:
                    await self._fail(job.job_id, now - (deadline - grace_s))

    async def _last_renewals(self) -> dict[str, float]:
        entries = await self._state.ephemeral.all(SESSIONS) if self._state.ephemeral.shared else {}
        seen = {key: _AT.unpack(value)[0] for key, value in entries.items()}
        for job_id, at_s in self._seen.items():
            seen[job_id] = max(at_s, seen.get(job_id, 0.0))
        return seen

    async def _fail(self, job_id: str, silent_s: float) -> None:
        message = f"driver died: its session ended {silent_s:.1f} s ago without a finish"
        try:
            await self._jobs.end(job_id, JobState.FAILED, message=message)
        except StokerError as error:
            _log.warning("cannot fail job %s: %s", job_id, error)
