"""A driver's side of its job: it attaches to the cluster, and shows the output of its workers.

Made by ``stoker.init()``, ended by ``shutdown()`` or the exit of the process. A job is alive while its
driver holds the session, a websocket to the gcs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec

from stoker.exceptions import JobFinishedError, StokerError, UnavailableError
from stoker.runtime.driver.notebook_output import notebook_output
from stoker.runtime.driver.printing import Printer
from stoker.runtime.process.cells import CELLS
from stoker.runtime.serialization.exceptions import encode_error
from stoker_wire.http.auth import token_digest
from stoker_wire.messages.control import LogCursors, LogLine
from stoker_wire.messages.work import (
    JOB_IS_OVER,
    SESSION_BEAT,
    SESSION_BEAT_S,
    AttachDriver,
    FinishJob,
    Job,
    JobState,
    SessionMessage,
)
from stoker_wire.process.host_identity import pid_namespace, start_time

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.runtime.job import JobContext
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.common import RuntimeEnv
    from stoker_wire.messages.data import Failed

_log = logging.getLogger(__name__)
_CALL_S = 15.0
_HEAD_S = 0.5
_FINISH_S = 5.0
_RECONNECT_S = 0.3
_SESSION_SILENCE_S = 4.0
"""After so long without a word from the gcs its session is opened anew, perhaps at another replica."""
_LAST_LINES_S = 60.0
"""How long the end of a driver waits for the last output of its workers, as long as it comes."""
_LAST_LINES_SILENCE_S = 15.0
"""How long it waits for the next line."""
_SILENCE_S = 3600.0
_MAX_UNPRINTED_LINES = 10_000


class _Pending(Protocol):
    """The calls of this process that are not settled."""

    def lose_cluster(self, failed: Failed) -> None: ...


class _UnseenErrors(Protocol):
    """The errors of this process's tasks that nobody has seen yet."""

    def on_job_end(self) -> None: ...


class _Head(Protocol):
    """The head of a cluster that ``init()`` started."""

    @property
    def pid(self) -> int: ...
    @property
    def log_path(self) -> Path: ...
    def is_alive(self) -> bool: ...


class Driver:
    """This process as the driver of a job."""

    def __init__(
        self,
        identity: Identity,
        io: IoThread,
        gcs: Client,
        job: JobContext,
        pending: _Pending,
        unseen: _UnseenErrors,
    ) -> None:
        self._identity = identity
        self._io = io
        self._gcs = gcs
        self._job = job
        self._pending = pending
        self._unseen = unseen
        self._submitted = False
        self._finishes = self._is_over = False
        self._following: asyncio.Task[None] | None = None
        self._printer: Printer | None = None
        self._cursors: dict[str, int] = {}
        """The offset of the last line shown, by worker."""

    def attach(
        self,
        job_id: str | None,
        env: RuntimeEnv,
        *,
        namespace: str | None,
        queue: str | None,
        priority: int,
        attempt: int,
    ) -> None:
        """Become a new job, or the submitted one that this process is the driver of."""
        attach = AttachDriver(
            job_id=job_id,
            entrypoint=" ".join(sys.argv)[:4096] or "python",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            pid_started=start_time(os.getpid()),
            pid_namespace=pid_namespace(),
            namespace=namespace,
            runtime_env=env,
            queue=queue or "",
            priority=priority,
            attempt=attempt,
        )
        job = self._io.run(
            self._gcs.call("POST", "/v1/jobs/attach", attach, reply=Job, timeout_s=_CALL_S),
            _CALL_S + 1,
        )
        if job.token:
            self._identity.credential.replace(job.token)
        self._submitted = job.submitted
        token_file = os.environ.get("STOKER_TOKEN_FILE", "")
        if job.submitted and token_file and os.environ.get("STOKER_JOB_ID") == job.job_id:
            self._identity.credential.follow(token_file)  # its nodelet renews that
        self._job.join(job)

    def begin(self, *, follow_logs: bool) -> None:
        """Hold the session that keeps the job alive; show the output of workers if wanted."""
        if not self._submitted:
            self._io.call_soon(self._hold_session)
        if (notebook := notebook_output()) is not None:
            CELLS.of_caller = notebook.cell
        if follow_logs:
            self._printer = Printer()
            self._io.call_soon(self._show_output)

    def watch_head(self, head: _Head) -> None:
        """Fail all pending calls if the cluster that ``init()`` started dies."""
        self._io.call_soon(
            lambda: self._io.background.spawn(self._until_head_ends(head), name="head")
        )

    async def _until_head_ends(self, head: _Head) -> None:
        while head.is_alive():  # noqa: ASYNC110 (the end of a process is no event here)
            await asyncio.sleep(_HEAD_S)
        if self._io.running:
            self._pending.lose_cluster(
                encode_error(
                    UnavailableError(
                        "the local cluster is gone\n"
                        f"its head (pid {head.pid}) ended, see {head.log_path}\n"
                        "call stoker.shutdown() and stoker.init() to go on"
                    )
                )
            )

    def _hold_session(self) -> None:
        self._io.background.spawn(self._session(), name="session")

    def _show_output(self) -> None:
        self._following = self._io.background.spawn(self._follow_logs(), name="logs")

    async def _session(self) -> None:
        while self._io.running and not self._is_over:
            with contextlib.suppress(StokerError, aiohttp.ClientError, OSError):
                path = f"/v1/jobs/{self._job.job_id}/session"
                url = self._gcs.url
                ws = await self._gcs.ws(path, heartbeat_s=None, timeout_s=_SESSION_SILENCE_S)
                async with ws, asyncio.TaskGroup() as group:
                    beats = group.create_task(self._beat(ws))
                    with contextlib.suppress(TimeoutError, UnavailableError):
                        while not ws.closed:
                            async with self._gcs.attend(url):
                                message = await ws.receive(_SESSION_SILENCE_S)
                            if ws.close_code == JOB_IS_OVER:
                                self._lose_job(message.extra or "")
                            elif not ws.closed:
                                await self._renew_token(ws, message)
                    beats.cancel()
            await asyncio.sleep(_RECONNECT_S)

    async def _renew_token(
        self, ws: aiohttp.ClientWebSocketResponse, message: aiohttp.WSMessage
    ) -> None:
        """Take over the token that the gcs sends when another secret signs, and say so."""
        if message.type is not aiohttp.WSMsgType.TEXT or message.data == SESSION_BEAT:
            return
        token = ""
        with contextlib.suppress(
            msgspec.MsgspecError
        ):  # a newer gcs may say more than this process knows
            token = msgspec.json.decode(message.data, type=SessionMessage).token
        if token:
            self._identity.renew_token(token)
            answer = SessionMessage(took=token_digest(token))
            await ws.send_str(msgspec.json.encode(answer).decode())

    def _lose_job(self, how: str) -> None:
        """Fail all pending calls: nothing runs for a job that has ended, whoever ended it."""
        self._is_over = True
        if not self._finishes:
            self._pending.lose_cluster(
                encode_error(
                    JobFinishedError(
                        f"job {self._job.job_id} is over: {how}\n"
                        "call stoker.shutdown() and stoker.init() to go on"
                    )
                )
            )

    async def _beat(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        """Say that this process answers; a cluster that hears nothing looks whether it lives."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while True:
                await ws.send_str(SESSION_BEAT)
                await asyncio.sleep(SESSION_BEAT_S)

    async def _follow_logs(self) -> None:
        path = f"/v1/jobs/{self._job.job_id}/worker-logs"
        while self._io.running:
            with contextlib.suppress(StokerError):
                stream = self._gcs.stream(
                    path, item=LogLine, query={"follow": 1}, silence_s=_SILENCE_S
                )
                async with aclosing(stream) as lines:
                    async for line in lines:
                        # A stream that broke off starts again from the first line.
                        if line.cursor > self._cursors.get(line.worker_id, -1):
                            self._show(line)
                            await self._wait_for_printer()
            await asyncio.sleep(_RECONNECT_S)

    async def _wait_for_printer(self) -> None:
        if self._printer is not None and len(self._printer) > _MAX_UNPRINTED_LINES:
            await asyncio.sleep(_RECONNECT_S)

    def _show(self, line: LogLine) -> None:
        assert self._printer is not None
        if line.worker_id:
            self._cursors[line.worker_id] = line.cursor
        self._printer.put(line)

    def finish(self, *, reachable: bool, exits: bool = False) -> None:
        """Show the last output of the workers; report the end of the job, and its outcome, to the gcs.

        Nothing is sent where the cluster is not ``reachable`` any more. Where the process ``exits``,
        its exit code is the outcome.
        """
        self._finishes = True
        if self._printer is not None:
            if reachable:
                with contextlib.suppress(StokerError):
                    self._io.run(self._show_last_lines(), _LAST_LINES_S + 1)
            self._printer.close(_LAST_LINES_SILENCE_S)
        self._unseen.on_job_end()
        if self._submitted or not reachable:
            return  # of a submitted job the exit code of the process says how it ended
        error = getattr(sys, "last_value", None)
        message = f"{type(error).__name__}: {error}"[:2000] if error is not None else ""
        # After a KeyboardInterrupt Python ends itself by the signal, without an exit code.
        if exits and not isinstance(error, KeyboardInterrupt):
            from stoker.runtime.driver.exit_code import report_exit_code

            job_id = self._job.job_id
            if report_exit_code(
                self._gcs.url,
                token=self._identity.token,
                job_id=job_id,
                message=message,
                tls=self._gcs.tls,
            ):
                return
        finish = FinishJob(state=JobState.SUCCEEDED, exit_code=0)
        if error is not None:
            finish = FinishJob(
                state=JobState.FAILED,
                exit_code=1,
                message=message,
            )
        request = self._gcs.call(
            "POST", f"/v1/jobs/{self._job.job_id}/finish", finish, timeout_s=_FINISH_S
        )
        self._io.run(request, _FINISH_S + 1)

    async def _show_last_lines(self) -> None:
        """Show the output of the workers up to now that was not shown yet."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        failure = ""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(_LAST_LINES_SILENCE_S) as deadline:
                stream = self._gcs.stream(
                    f"/v1/jobs/{self._job.job_id}/worker-logs",
                    item=LogLine,
                    body=LogCursors(cursors=self._cursors),
                    silence_s=_LAST_LINES_SILENCE_S,
                )
                async with aclosing(stream) as lines:
                    async for line in lines:
                        self._show(line)
                        next_s = loop.time() + _LAST_LINES_SILENCE_S
                        deadline.reschedule(min(next_s, began_s + _LAST_LINES_S))
        except TimeoutError:
            failure = f"it had not all come after {loop.time() - began_s:.0f} s"
        except StokerError as error:
            failure = str(error)
        if failure:
            _log.warning(
                "the last output of the workers is missing: %s (see: stoker logs --workers %s)",
                failure,
                self._job.job_id,
            )
