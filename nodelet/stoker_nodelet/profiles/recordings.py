"""Profiles of the processes of this node: one per process at a time, bounded in time and size.

py-spy records a process from outside. What only the process itself can record (allocations, operators
of torch) it records on order, and sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker_nodelet.profiles import py_spy
from stoker_nodelet.profiles.stacks import process_of
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    ForbiddenError,
    PayloadTooLargeError,
)
from stoker_wire.http.codec import MSGPACK, encode_msgpack
from stoker_wire.messages.node_api import (
    MAX_PROFILE_NBYTES,
    PROFILE_FORMATS,
    ProfileKind,
    ProfileOptions,
    RecordProfile,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_nodelet.workers.processes import Process
    from stoker_wire.messages.node_api import TakeWorkerProfile

_START_S = 60.0
"""What reading symbols, importing a profiler and writing a report may take on top of the recording."""
_CHUNK_NBYTES = 1 << 20


class _Running(NamedTuple):
    kind: ProfileKind
    until_s: float


@dataclass(slots=True)
class Recordings:
    """The profiles that are being taken here, by worker."""

    workers: Workers
    program: str
    running: dict[str, _Running] = field(default_factory=dict)

    def traces(self, worker_id: str) -> bool:
        """Return whether py-spy has its hands on a process."""
        running = self.running.get(worker_id)
        return running is not None and running.kind is ProfileKind.CPU

    @contextlib.asynccontextmanager
    async def take(self, worker_id: str, order: TakeWorkerProfile) -> AsyncIterator[Path]:
        """Yield the file of a profile, once it is taken; it is removed afterwards."""
        check_format(order)
        process = process_of(self.workers, worker_id)
        self._check_job(worker_id, order.job_id)
        running = self.running.get(worker_id)
        if running is not None:
            left_s = max(0.0, running.until_s - time.monotonic())
            raise ConflictError(
                f"a {running.kind} profile of {worker_id} is being taken, for {left_s:.0f} s more\n"
                "take one at a time of a process"
            )
        if order.kind is not ProfileKind.CPU and process.socket_path is None:
            raise BadRequestError(
                f"kind: a driver takes no {order.kind} profile of itself\n"
                "take one of a task, an actor or a worker, or use the profiler in the program",
                field="kind",
            )
        folder = Path(tempfile.mkdtemp(prefix="profile-", dir=self.workers.identity.session_dir))
        try:
            path = folder / "profile"
            limit_s = order.seconds + _START_S
            self.running[worker_id] = _Running(order.kind, time.monotonic() + order.seconds)
            try:
                async with asyncio.timeout(limit_s):
                    await self._record(process, order, path)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"the profile of {worker_id} was not done within {limit_s:g} s"
                ) from None
            finally:
                del self.running[worker_id]  # another may be taken while this one is sent
            self._check_job(worker_id, order.job_id)
            if _size(path) > MAX_PROFILE_NBYTES:
                raise _too_large()
            yield path
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _check_job(self, worker_id: str, job_id: str) -> None:
        """Raise ForbiddenError if a worker works for another job than the one that was looked at."""
        worker = self.workers.state.workers.get(worker_id)
        if worker is None:
            raise ConflictError(f"{worker_id} has ended meanwhile\nsee: stoker list workers")
        if worker.job_id != job_id:
            raise ForbiddenError(f"{worker_id} works for another job meanwhile\nask again")

    async def _record(self, process: Process, order: ProfileOptions, path: Path) -> None:
        if order.kind is ProfileKind.CPU:
            await self._by_py_spy(process, order, path)
        else:
            await self._by_worker(process, order, path)

    async def _by_py_spy(self, process: Process, order: ProfileOptions, path: Path) -> None:
        program = py_spy.find(self.program)
        if self.program == py_spy.OFF:
            raise ConflictError("py-spy is off on this node\nset STOKER_PY_SPY there")
        if program is None:
            raise ConflictError(py_spy.NOT_INSTALLED)
        pid = process.pid if process.socket_path is not None else py_spy.python_pid(process.pid)
        command = py_spy.record_command(program, pid, order, path)
        await py_spy.run(command, pid, order.seconds + _START_S)
        if not _size(path):
            raise ConflictError("the process has ended, or py-spy saw nothing of it")

    async def _by_worker(self, process: Process, order: ProfileOptions, path: Path) -> None:
        client = self.workers.processes.client_of(process)
        body = encode_msgpack(RecordProfile(kind=order.kind, seconds=order.seconds))
        headers = {"Content-Type": MSGPACK}
        nbytes = 0
        async with client.open("POST", "/v1/profile", data=body, headers=headers) as response:
            file = await asyncio.to_thread(open, path, "wb")
            with file:
                async for chunk in response.content.iter_chunked(_CHUNK_NBYTES):
                    nbytes += len(chunk)
                    if nbytes > MAX_PROFILE_NBYTES:
                        raise _too_large()
                    file.write(chunk)


def check_format(order: ProfileOptions) -> None:
    """Raise BadRequestError if a kind of profile has not that format."""
    formats = PROFILE_FORMATS[order.kind]
    if order.format is not None and order.format not in formats:
        raise BadRequestError(
            f"format: a {order.kind} profile has no {order.format}\ntake {' or '.join(formats)}",
            field="format",
        )


def _size(path: Path) -> int:
    """Return the size of a file; 0 if it is not there."""
    return path.stat().st_size if path.exists() else 0


def _too_large() -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the profile is larger than {MAX_PROFILE_NBYTES} bytes\ntake one of fewer seconds"
    )
