"""Tasks that run much longer than their function does: noticed while they run, with their stacks.

The measure is what earlier runs of the function took in this worker. Nothing here runs unless the setting
``slow_task_stacks`` asks for it, and what is remembered has bounds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from stoker.runtime.process.profiles.stacks import worker_stacks
from stoker_wire.errors import StokerError
from stoker_wire.messages.work import MAX_SLOW_STACK, ReportSlowTask

if TYPE_CHECKING:
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.call import CallTable, ReceivedCall
    from stoker_wire.messages.node_api import ThreadStack

FUNCTIONS = 64
RUNS = 100
LEAST_RUNS = 20
LEAST_S = 1.0
_EVERY_S = 10.0
_REPORT_S = 5.0


class UsualDurations:
    """The newest durations of each function: of so many functions, those that ran last."""

    def __init__(self) -> None:
        self._runs: dict[str, deque[float]] = {}

    def add(self, function: str, seconds: float) -> None:
        """Add a run that has ended."""
        runs = self._runs.pop(function, None) or deque(maxlen=RUNS)
        runs.append(seconds)
        self._runs[function] = runs
        if len(self._runs) > FUNCTIONS:
            del self._runs[next(iter(self._runs))]

    def p99_s(self, function: str) -> tuple[float, int] | None:
        """Return the 99th percentile of a function and of how many runs; None if they are too few."""
        runs = self._runs.get(function)
        if runs is None or len(runs) < LEAST_RUNS:
            return None
        ordered = sorted(runs)
        return ordered[math.ceil(0.99 * len(ordered)) - 1], len(ordered)


class SlowTasks:
    """The watch over the calls of this worker."""

    def __init__(
        self, factor: float, io: IoThread, clients: ClusterClients, calls: CallTable, worker_id: str
    ) -> None:
        self._factor = factor
        self._io = io
        self._clients = clients
        self._calls = calls
        self._worker_id = worker_id
        self._usual = UsualDurations()
        self._told: set[str] = set()
        self._next_at_s = 0.0

    def ended(self, received: ReceivedCall, ended_at_s: float) -> None:
        """Learn from a call that has ended (any thread)."""
        if received.started_at_s:
            self._usual.add(received.template.name, ended_at_s - received.started_at_s)
        self._told.discard(received.call.task_id)

    def tick(self) -> None:
        """Look at the calls that run (loop thread)."""
        now_s = time.time()
        if now_s < self._next_at_s:
            return
        for received in list(self._calls.running.values()):
            ran_s = now_s - received.started_at_s
            if not received.started_at_s or ran_s < LEAST_S:
                continue
            usual = self._usual.p99_s(received.template.name)
            if usual is None or ran_s < self._factor * usual[0]:
                continue
            if received.call.task_id not in self._told:
                self._told.add(received.call.task_id)
                self._next_at_s = now_s + _EVERY_S
                self._report(received, ran_s, *usual)
                return

    def _report(self, received: ReceivedCall, ran_s: float, p99_s: float, runs: int) -> None:
        found = worker_stacks(())
        report = ReportSlowTask(
            attempt=received.call.attempt,
            name=received.template.name,
            ran_s=ran_s,
            p99_s=p99_s,
            runs=runs,
            worker_id=self._worker_id,
            stack=text_of((*found.coroutines, *found.threads))[:MAX_SLOW_STACK],
        )
        path = f"/v1/tasks/{received.call.task_id}/slow"
        self._io.background.spawn(self._send(path, report), name="slow-task")

    async def _send(self, path: str, report: ReportSlowTask) -> None:
        try:
            await self._clients.gcs.call("POST", path, report, timeout_s=_REPORT_S)
        except StokerError:
            return  # it was for information


def text_of(threads: tuple[ThreadStack, ...]) -> str:
    """Return stacks as text, the innermost function of each first."""
    lines = []
    for thread in threads:
        lines.append(thread.name)
        lines += [f"  {one.function} ({one.file}:{one.line})" for one in thread.frames]
    return "\n".join(lines)
