"""Drivers' sessions: a WebSocket per attached driver, and the verdict on a driver that has none.

Any replica may hold a session; the leading one decides. A session is an entry of the ephemeral store,
renewed every second, so a driver may reconnect to another replica. Silence proves nothing: a driver may
be stopped, or busy in C code, and so may the replica that held its session. A driver is dead when its
connection is closed and it does not come back, or when its process is seen to be gone; of one of which
nobody can tell, when nothing was heard for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import ClientError, WSMsgType

from stoker_gcs.registry.jobs.driver_processes import Seen
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.messages.work import JOB_IS_OVER, SESSION_BEAT, SESSION_BEAT_S, FinishJob, JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

    from stoker_gcs.registry.jobs.driver_processes import DriverProcesses
    from stoker_gcs.registry.jobs.driver_tokens import DriverTokens
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.server.service import Request
    from stoker_wire.messages.work import Job
    from stoker_wire.settings import Settings

_log = logging.getLogger(__name__)
SESSIONS = "sessions"
RENEW_S = 1.0
KEPT_S = 600.0
"""How much longer an entry is kept than a job survives a driver of which nothing is heard."""
CHECK_S = 0.25
LOOK_S = 0.5
"""Pause between two looks at the process of a driver that may be dead."""
LOOK_TIMEOUT_S = 3.0
"""How long a look may take; who is silent for so long cannot tell."""
SHARED_SLACK_S = 3.0
"""How much later the renewal of another replica may be seen than one of this process."""
SILENT_S = 5.0
"""A driver of which so long nothing was heard may be dead, though its connection is open."""
DATABASE_AGAIN_S = 0.5
"""Pause before the database is asked again for the state of a job, when it did not answer."""
_ENTRY = struct.Struct("<dd?")


class Session(NamedTuple):
    """State of a driver's session; times in seconds since the epoch."""

    renewed_s: float
    """When the replica that holds it, or held it last, said so."""
    heard_s: float
    """When the driver sent something last."""
    is_open: bool


class Doubt(NamedTuple):
    """Reason for which a driver may be dead, since when, and how long its job survives that."""

    since_s: float
    limit_s: float
    text: str
    """A clause with ``{}`` for the time since then."""


class Look(NamedTuple):
    """A look at the process of a driver: when it ended, and what it found."""

    at_s: float
    seen: Seen
    ran_at_s: float
    """When a look found the process running last; 0: never."""


class DriverSessions:
    """The sessions that this replica holds, and the check of those of all replicas."""

    def __init__(
        self,
        state: StateStore,
        jobs: JobRegistry,
        processes: DriverProcesses,
        tokens: DriverTokens,
        settings: Settings,
        replica_id: str,
    ) -> None:
        self._state = state
        self._jobs = jobs
        self._processes = processes
        self._tokens = tokens
        self._replica_id = replica_id
        self._settings = settings
        self._ttl_s = settings.driver_unreachable_s + KEPT_S
        self._open: dict[str, int] = {}
        self._seen: dict[str, Session] = {}
        """The last state of each session that was held here."""
        self._of_others: dict[str, dict[str, Session]] = {}
        """By job, then by replica: what was read last of those held elsewhere; Redis may be emptied."""
        self._looked: dict[str, Look] = {}
        """The last look at each driver that may be dead."""

    async def serve(self, req: Request, ws: web.WebSocketResponse) -> None:
        """Hold a session until the driver closes it, dies, or its job ends."""
        job_id = req.path["job_id"]
        if job_id not in self._jobs.live:  # of those that are, a database that is away says nothing
            row = await self._state.find(JOBS, job_id)
            if row is None:
                await ws.close(code=4404, message=f"there is no job {job_id}".encode()[:120])
                return
            if row.record.state.terminal:
                await _close(ws, row.record)
                return
        _find_out_if_host_is_gone(req)
        token = self._tokens.of(req)
        with self._held(job_id):
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._close_at_end(job_id, ws)),
                    group.create_task(_beat(ws)),
                ]
                if token is not None:
                    tasks.append(group.create_task(self._tokens.renew(ws, token)))
                async for message in ws:
                    if message.type is WSMsgType.ERROR:
                        break
                    if token is not None and message.type is WSMsgType.TEXT:
                        token.on_text(message.data)
                    self._renew(job_id, heard=True)
                for task in tasks:
                    task.cancel()

    def behind(self) -> tuple[str, ...]:
        """Return the drivers that may have a token of another secret than the present one.

        Beside those with a session here that have not taken theirs, these are drivers without a session,
        while there is another secret. Of those at other replicas only these can tell.
        """
        found = self._tokens.behind()
        if self._state.store.shared or not self._tokens.rotates:
            return found
        away = (
            job_id
            for job_id, job in self._jobs.live.items()
            if not job.submitted and job.state is JobState.RUNNING and job_id not in self._open
        )
        return (*found, *(f"the driver of {job_id}, which has no session now" for job_id in away))

    async def until_exit(self, req: Request) -> None:
        """Hold a session until the driver's process exits: the last byte of its request is the code.

        A process that is killed sends none, and its job fails like that of any lost session.
        """
        job_id = req.path["job_id"]
        await self._state.get(JOBS, job_id)
        code: list[int] = []
        _find_out_if_host_is_gone(req)

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
        self._renew(job_id, heard=True)
        try:
            yield
        finally:
            self._open[job_id] -= 1
            if not self._open[job_id]:
                del self._open[job_id]
            self._renew(job_id)

    async def _close_at_end(self, job_id: str, ws: web.WebSocketResponse) -> None:
        with self._state.log.signal(job_id) as signal:
            while True:
                signal.clear()
                try:
                    job = await self._state.get(JOBS, job_id)
                except UnavailableError:  # the driver lives on all the same
                    await asyncio.sleep(DATABASE_AGAIN_S)
                    continue
                if job.state.terminal:
                    await _close(ws, job)
                    return
                await signal.wait()

    def _renew(self, job_id: str, *, heard: bool = False) -> None:
        now = self._state.now()
        before = self._seen.get(job_id)
        heard_s = now if heard or before is None else before.heard_s
        session = self._seen[job_id] = Session(now, heard_s, job_id in self._open)
        key = f"{job_id} {self._replica_id}"
        self._state.ephemeral.put(SESSIONS, key, _ENTRY.pack(*session), self._ttl_s)

    async def renew(self) -> None:
        """Renew the sessions that this replica holds, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            for job_id in list(self._open):
                self._renew(job_id)
            for job_id in self._seen.keys() - self._jobs.live.keys():
                del self._seen[job_id]

    async def fail_lost(self) -> None:
        """Fail the jobs whose driver is dead, until cancelled; runs on the leading replica."""
        began_s = self._state.now()
        loop = asyncio.get_running_loop()
        last, expected_s = loop.time(), CHECK_S
        while True:
            await asyncio.sleep(CHECK_S)
            attached = [
                job
                for job in self._jobs.live.values()
                if not job.submitted and job.state is JobState.RUNNING
            ]
            sessions = await self._sessions() if attached else {}
            if loop.time() - last - expected_s > self._settings.driver_reconnect_s / 2:
                # This process was stopped and could not hear of any driver.
                began_s = self._state.now()
            last = loop.time()
            # All verdicts are of this moment: nothing is waited for between sessions and verdicts.
            doubts = self._doubts(attached, sessions, began_s)
            verdicts = {job.job_id: self._verdict(job, doubt) for job, doubt in doubts}
            for job_id, what in verdicts.items():
                if what is not None:
                    await self._fail(job_id, f"driver died: {what}")
            due = [job for job, _ in doubts if verdicts[job.job_id] is None and self._is_due(job)]
            expected_s = CHECK_S + (LOOK_TIMEOUT_S if due else 0.0)
            await asyncio.gather(*(self._look(job) for job in due))

    def _doubts(
        self, attached: list[Job], sessions: dict[str, Session], began_s: float
    ) -> list[tuple[Job, Doubt]]:
        """Return the jobs whose drivers may be dead, and for so long that somebody should look."""
        found = []
        for job in attached:
            doubt = self._doubt(job, sessions.get(job.job_id), began_s)
            if doubt is not None:
                silent_s = self._state.now() - doubt.since_s
                if silent_s >= min(doubt.limit_s, self._settings.driver_reconnect_s):
                    found.append((job, doubt))
        in_doubt = {job.job_id for job, _ in found}
        self._looked = {i: looked for i, looked in self._looked.items() if i in in_doubt}
        return found

    def _doubt(self, job: Job, session: Session | None, began_s: float) -> Doubt | None:
        """Return why a driver may be dead, or None if it was heard of just now."""
        settings, now = self._settings, self._state.now()
        if session is None:
            since_s = max(began_s, job.started_at_s or job.created_at_s)
            return Doubt(since_s, settings.restart_reconnect_s, "it has had no session for {}")
        if not session.is_open:
            was_silent = session.renewed_s - session.heard_s > SILENT_S
            limit_s = settings.driver_reconnect_s
            if was_silent:
                # Its machine may be suspended, or cut off, just as its process may have ended.
                limit_s = max(limit_s, settings.driver_unreachable_s)
            limit_s += SHARED_SLACK_S if self._state.store.shared else 0.0
            return Doubt(
                max(session.renewed_s, began_s),
                limit_s,
                "its session ended {} ago without a finish",
            )
        if job.job_id not in self._open and now - session.renewed_s > SHARED_SLACK_S:
            limit_s = max(settings.driver_reconnect_s, settings.driver_unreachable_s)
            text = "the gcs replica that held its session is gone for {}, and it came to no other"
            return Doubt(max(session.renewed_s, began_s), limit_s, text)
        if now - session.heard_s <= SILENT_S:
            return None
        return Doubt(max(session.heard_s, began_s), math.inf, "it has said nothing for {}")

    def _verdict(self, job: Job, doubt: Doubt) -> str | None:
        """Return why a driver is dead, as far as anybody can tell; None if it may live."""
        looked = self._looked.get(job.job_id)
        if looked is None:
            return None
        settings = self._settings
        silent_s = self._state.now() - doubt.since_s
        if looked.seen is Seen.GONE:
            return f"its process {job.pid} on {job.hostname} is gone, without a finish"
        if looked.seen is Seen.RUNNING or math.isinf(doubt.limit_s):
            limit_s = settings.driver_unresponsive_s or math.inf
            what = f"its process has not answered for {silent_s:.1f} s"
            return f"{what} (STOKER_DRIVER_UNRESPONSIVE_S)" if silent_s > limit_s else None
        limit_s = doubt.limit_s
        if looked.seen is Seen.CUT_OFF:
            limit_s = max(limit_s, settings.driver_unreachable_s)
        # Who looks may be gone for a moment, as a nodelet is that starts again: the look is after the limit.
        if looked.at_s - max(doubt.since_s, looked.ran_at_s) <= limit_s:
            return None
        return doubt.text.format(f"{silent_s:.1f} s")

    def _is_due(self, job: Job) -> bool:
        looked = self._looked.get(job.job_id)
        return looked is None or self._state.now() - looked.at_s >= LOOK_S

    async def _look(self, job: Job) -> None:
        """Look at the process of a driver that may be dead, for the next verdict."""
        seen = Seen.CUT_OFF
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                seen = await self._processes.look(job)
        now, before = self._state.now(), self._looked.get(job.job_id)
        ran_at_s = now if seen is Seen.RUNNING else before.ran_at_s if before is not None else 0.0
        self._looked[job.job_id] = Look(now, seen, ran_at_s)

    async def _sessions(self) -> dict[str, Session]:
        """Return the session of each driver in which it was heard last: it may have had several."""
        found = list(self._seen.items())
        if self._state.ephemeral.shared:
            for key, entry in (await self._state.ephemeral.all(SESSIONS)).items():
                job_id, _, replica_id = key.partition(" ")
                if replica_id != self._replica_id and len(entry) == _ENTRY.size:
                    held = self._of_others.setdefault(job_id, {})
                    held[replica_id] = Session(*_ENTRY.unpack(entry))
            for job_id in self._of_others.keys() - self._jobs.live.keys():
                del self._of_others[job_id]
            found += [
                (job_id, session)
                for job_id, held in self._of_others.items()
                for session in held.values()
            ]
        found.sort(key=lambda item: item[1].heard_s)
        return dict(found)

    async def _fail(self, job_id: str, message: str) -> None:
        try:
            await self._jobs.end(job_id, JobState.FAILED, message=message)
        except StokerError as error:
            _log.warning("cannot fail job %s: %s", job_id, error)


def _find_out_if_host_is_gone(req: Request) -> None:
    """Have the kernel close the connection if the driver's machine does not answer any more."""
    transport = req.http.transport
    if transport is not None:
        keep_alive(transport.get_extra_info("socket"))


async def _close(ws: web.WebSocketResponse, job: Job) -> None:
    """Say how a job has ended; a reason of a WebSocket has 123 bytes at most (RFC 6455, 5.5)."""
    text = f"it is {job.state}" + (f": {job.message}" if job.message else "")
    await ws.close(code=JOB_IS_OVER, message=text.encode()[:123].decode(errors="ignore").encode())


async def _beat(ws: web.WebSocketResponse) -> None:
    """Say that this replica answers: a driver that hears nothing goes to another one."""
    with contextlib.suppress(ClientError, OSError):
        while True:
            await ws.send_str(SESSION_BEAT)
            await asyncio.sleep(SESSION_BEAT_S)
