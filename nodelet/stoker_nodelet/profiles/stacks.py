"""Stacks of the processes of this node, by the best way that there is, within a second.

The worker itself is asked at the same time, for the calls that it runs and for what its event loops
wait for, which nobody sees from outside. A worker that does not answer has its stacks all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stoker_nodelet.profiles import faulthandler_stacks, py_spy
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.node_api import ProcessStacks, StackWay, WorkerStacks

if TYPE_CHECKING:
    from stoker_nodelet.workers.processes import Process
    from stoker_wire.messages.node_api import ThreadStack

_PY_SPY_SHARE = 0.65
_ASK_SHARE = 0.85
"""By then a worker has answered: what is left of the time is for the signal."""
_AT_ONCE = 4
_PROFILED = "a profile of this process is being taken"


@dataclass(slots=True)
class StackReader:
    """The reader of stacks. ``profiled`` says whether something traces a worker already."""

    workers: Workers
    program: str
    timeout_s: float
    profiled: Callable[[str], bool]
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def read(self, worker_id: str) -> ProcessStacks:
        """Return the stacks of a worker or a driver; ``error`` says why there are none."""
        process = process_of(self.workers, worker_id)
        async with self._slots:
            stacks = await self._read(worker_id, process)
        worker = self.workers.state.workers.get(worker_id)
        if worker is None:
            raise NotFoundError(f"{worker_id} has just ended\nsee: stoker list workers")
        return _with_process(
            stacks, worker_id, self.workers.identity.node_id, worker.job_id, process.pid
        )

    async def _read(self, worker_id: str, process: Process) -> ProcessStacks:
        until_s = time.monotonic() + self.timeout_s
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask(process))
            threads, why = await self._by_py_spy(worker_id, process)
            answer = await asking
        asked = answer or WorkerStacks()
        way = StackWay.PY_SPY
        if threads is None and answer is not None:
            threads, way = answer.threads, StackWay.WORKER
        error = ""
        if threads is None and process.socket_path is not None:
            way = StackWay.SIGNAL
            try:
                left_s = max(0.05, until_s - time.monotonic())
                threads = await faulthandler_stacks.dump(process.pid, left_s)
            except StokerError as failure:
                error = failure.message
        elif threads is None:
            error = why
        return ProcessStacks(
            threads=threads or (),
            coroutines=asked.coroutines,
            task_ids=asked.task_ids,
            way=way if threads is not None else None,
            why_not_better=why,
            error=error,
        )

    async def _by_py_spy(
        self, worker_id: str, process: Process
    ) -> tuple[tuple[ThreadStack, ...] | None, str]:
        """Return the threads; None, and why, if py-spy cannot say."""
        program = py_spy.find(self.program)
        if self.program == py_spy.OFF:
            return None, "py-spy is off on this node (STOKER_PY_SPY)"
        if program is None:
            return None, py_spy.NOT_INSTALLED
        if self.profiled(worker_id):
            return None, _PROFILED
        pid = process.pid if process.socket_path is not None else py_spy.python_pid(process.pid)
        try:
            return await py_spy.dump(program, pid, _PY_SPY_SHARE * self.timeout_s), ""
        except ConflictError as error:
            # A profile that began meanwhile traces the process, and only one tracer may.
            return None, _PROFILED if self.profiled(worker_id) else error.message

    async def _ask(self, process: Process) -> WorkerStacks | None:
        """Return what a worker says of itself; None if it does not answer, or is a driver."""
        if process.socket_path is None:
            return None
        timeout_s = _ASK_SHARE * self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.workers.processes.client_of(process).call(
                    "POST", "/v1/stacks", reply=WorkerStacks, timeout_s=timeout_s, retry=False
                )
        except (StokerError, TimeoutError):
            return None


def process_of(workers: Workers, worker_id: str) -> Process:
    """Return the process of a worker of this node that runs."""
    process = workers.processes.living.get(worker_id)
    if process is None or worker_id not in workers.state.workers:
        raise NotFoundError(f"{worker_id} does not run on this node\nsee: stoker list workers")
    if not process.pid:
        raise ConflictError(f"{worker_id} is being started\nask again in a moment")
    return process


def _with_process(
    stacks: ProcessStacks, worker_id: str, node_id: str, job_id: str, pid: int
) -> ProcessStacks:
    return msgspec.structs.replace(
        stacks, worker_id=worker_id, node_id=node_id, job_id=job_id, pid=pid
    )
