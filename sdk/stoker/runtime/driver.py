"""What only a driver does: it is a job to the cluster, and it shows its workers' output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

import aiohttp

from stoker.exceptions import StokerError, UnavailableError
from stoker_wire.messages.control import LogLine
from stoker_wire.messages.work import AttachDriver, FinishJob, Job, JobState

if TYPE_CHECKING:
    from stoker._launch.cluster import LocalCluster
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.common import RuntimeEnv

_CALL_S = 15.0
_HEAD_S = 0.5
_FINISH_S = 5.0
_RECONNECT_S = 0.3
_LAST_LINES_S = 0.05
_SILENCE_S = 3600.0


class Driver:
    """This process as a job."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._submitted = False
        self._cursors: dict[str, int] = {}
        """Offset of the last line shown, by worker."""

    def attach(self, job_id: str | None, namespace: str | None, env: RuntimeEnv) -> None:
        """Become a new job, or the submitted one that this process is the driver of."""
        runtime = self._runtime
        attach = AttachDriver(
            job_id=job_id,
            entrypoint=" ".join(sys.argv)[:4096] or "python",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            namespace=namespace,
            runtime_env=env,
        )
        job = runtime.run(
            runtime.gcs.call("POST", "/v1/jobs/attach", attach, reply=Job, timeout_s=_CALL_S),
            _CALL_S + 1,
        )
        self._submitted = job.submitted
        runtime.join_job(job)

    def begin(self, *, follow_logs: bool) -> None:
        """Hold the session that says that this driver lives; show output if wanted."""
        runtime = self._runtime
        if not self._submitted:
            runtime.call_soon(self._spawn, "session")
        if follow_logs:
            runtime.call_soon(self._spawn, "logs")

    def watch_head(self, head: LocalCluster) -> None:
        """Fail what waits if the cluster that ``init()`` started dies under this driver."""
        runtime = self._runtime
        runtime.call_soon(
            lambda: runtime.background.spawn(self._until_head_ends(head), name="head")
        )

    async def _until_head_ends(self, head: LocalCluster) -> None:
        while head.is_alive():  # noqa: ASYNC110 (the end of a process is no event here)
            await asyncio.sleep(_HEAD_S)
        if self._runtime.running:
            self._runtime.lose_cluster(
                UnavailableError(
                    f"the local cluster is gone: its head (pid {head.pid}) ended, see "
                    f"{head.log_path}; call stoker.shutdown() and stoker.init() to go on"
                )
            )

    def _spawn(self, what: str) -> None:
        work = self._session() if what == "session" else self._follow_logs()
        self._runtime.background.spawn(work, name=what)

    async def _session(self) -> None:
        runtime = self._runtime
        while runtime.running:
            with contextlib.suppress(StokerError, aiohttp.ClientError, OSError):
                line = await runtime.gcs.ws(f"/v1/jobs/{runtime.job_id}/session")
                async with line:
                    async for _ in line:
                        continue
            await asyncio.sleep(_RECONNECT_S)

    async def _follow_logs(self) -> None:
        runtime = self._runtime
        path = f"/v1/jobs/{runtime.job_id}/worker-logs"
        while runtime.running:
            with contextlib.suppress(StokerError):
                stream = runtime.gcs.stream(
                    path, item=LogLine, query={"follow": 1}, silence_s=_SILENCE_S
                )
                async with aclosing(stream) as lines:
                    async for line in lines:
                        # A stream that was cut off starts again from the first line.
                        if line.cursor > self._cursors.get(line.worker_id, -1):
                            self._cursors[line.worker_id] = line.cursor
                            show(line)
            await asyncio.sleep(_RECONNECT_S)

    def finish(self) -> None:
        """Tell the gcs that the job is over, and how."""
        if self._submitted:
            return  # the exit code of the process says it
        runtime = self._runtime
        error = getattr(sys, "last_value", None)
        finish = FinishJob(state=JobState.SUCCEEDED, exit_code=0)
        if error is not None:
            finish = FinishJob(
                state=JobState.FAILED,
                exit_code=1,
                message=f"{type(error).__name__}: {error}"[:2000],
            )
        work = runtime.gcs.call(
            "POST", f"/v1/jobs/{runtime.job_id}/finish", finish, timeout_s=_FINISH_S
        )
        runtime.run(self._after_last_lines(), _FINISH_S)
        runtime.run(work, _FINISH_S + 1)

    async def _after_last_lines(self) -> None:
        """Wait while output still comes in (it travels behind the results)."""
        for _ in range(4):
            seen = dict(self._cursors)
            await asyncio.sleep(_LAST_LINES_S)
            if self._cursors == seen:
                return


def show(line: LogLine) -> None:
    """Print a worker's line at the driver."""
    prefix = f"({line.name or 'worker'} pid={line.pid})"
    if sys.stdout.isatty():
        prefix = f"\x1b[36m{prefix}\x1b[0m"
    sys.stdout.write(f"{prefix} {line.text}\n")
    sys.stdout.flush()
