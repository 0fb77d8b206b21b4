"""Exit forensics: what ended a worker, said in one sentence with its evidence.

``describe`` is pure. ``Exits`` keeps the last thousand, lets callers wait for one, and tells the
gcs of each until that has acknowledged it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import WorkerExit

LOG_LINES = 50
_KEPT = 1000
_BATCH = 100
_AWAY_S = 0.5

Report = Callable[[tuple[WorkerExit, ...]], Awaitable[None]]

_log = logging.getLogger("stoker.nodelet.exits")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A wait status taken apart; exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    cause: str


def describe(status: int, *, killed_for: str = "", kernel_oom: bool = False) -> Outcome:
    """Name the cause of an exit: why we killed it, else the kernel's reason, else what it did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        cause = f"killed by {name}"
        if kernel_oom:
            cause = f"killed by the kernel's out-of-memory killer ({name})"
        elif number == signal.SIGKILL and not killed_for:
            cause += " from outside Stoker"
        return Outcome(None, number, killed_for or cause)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, None, killed_for or f"exited with code {code}")


@dataclass(slots=True)
class Exits:
    """The exits of this node's workers."""

    report: Report
    _known: dict[str, WorkerExit] = field(default_factory=dict)
    _untold: deque[WorkerExit] = field(default_factory=deque)
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict)

    def add(self, one: WorkerExit) -> None:
        """Keep an exit, wake who waits for it, and have it told to the gcs."""
        self._known[one.worker_id] = one
        if len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        self._untold.append(one)
        self._came.set()
        waiting = self._waiting.pop(one.worker_id, None)
        if waiting is not None:
            waiting.set()

    def get(self, worker_id: str) -> WorkerExit | None:
        return self._known.get(worker_id)

    async def wait(self, worker_id: str, wait_s: float) -> WorkerExit | None:
        """Return the exit of a living worker, or None if it still lives after ``wait_s``."""
        if worker_id not in self._known and wait_s > 0:
            waiting = self._waiting.setdefault(worker_id, asyncio.Event())
            try:
                async with asyncio.timeout(wait_s):
                    await waiting.wait()
            except TimeoutError:
                pass
        return self._known.get(worker_id)

    async def run(self) -> None:
        """Tell the gcs of exits for ever, in order."""
        while True:
            await self._came.wait()
            self._came.clear()
            if not await self.flush():
                await asyncio.sleep(_AWAY_S)
                self._came.set()

    async def flush(self) -> bool:
        """Tell the gcs what it does not know yet; return False if it did not take it."""
        while self._untold:
            batch = tuple(self._untold)[:_BATCH]
            try:
                await self.report(batch)
            except StokerError as error:
                if error.status < 500:  # the gcs will never take these
                    _log.error("the gcs refused %d exits: %s", len(batch), error)
                else:
                    _log.warning("exits wait for the gcs: %s", error)
                    return False
            for _ in batch:
                self._untold.popleft()
        return True
