"""Exit forensics: the cause of a worker's end, in one sentence with its evidence.

``describe`` is pure. ``Exits`` keeps the last thousand, lets callers wait for one, and reports each to
the gcs until that has acknowledged it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stoker_wire.errors import ProtocolError, StokerError
from stoker_wire.messages.cluster import WorkerExit

LOG_LINES = 50
_MAX_EXITS = 1000
_BATCH = 100
_AWAY_S = 0.5

Report = Callable[[tuple[WorkerExit, ...]], Awaitable[None]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExitDescription:
    """A wait status taken apart; exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    cause: str


def describe(status: int, *, killed_for: str = "", kernel_oom: bool = False) -> ExitDescription:
    """Return the description; its cause is why we killed it, else the kernel's reason, else what it did."""
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
        return ExitDescription(None, number, killed_for or cause)
    code = os.waitstatus_to_exitcode(status)
    return ExitDescription(code, None, killed_for or f"exited with code {code}")


@dataclass(slots=True)
class Exits:
    """The exits of this node's workers, known here and on their way to the gcs."""

    report: Report
    _known: dict[str, WorkerExit] = field(default_factory=dict)
    _unreported: deque[WorkerExit] = field(default_factory=deque)
    _added: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict)
    _away: bool = False

    def add(self, worker_exit: WorkerExit) -> None:
        """Keep an exit, wake those who wait for it, and have it reported to the gcs."""
        self._known[worker_exit.worker_id] = worker_exit
        if len(self._known) > _MAX_EXITS:
            del self._known[next(iter(self._known))]
        self._unreported.append(worker_exit)
        self._added.set()
        waiting = self._waiting.pop(worker_exit.worker_id, None)
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
        """Report exits to the gcs for ever, in order."""
        while True:
            await self._added.wait()
            self._added.clear()
            if not await self.flush():
                await asyncio.sleep(_AWAY_S)
                self._added.set()

    async def flush(self) -> bool:
        """Report the exits that the gcs has not acknowledged; return False if it does not accept them now."""
        while self._unreported:
            batch = tuple(self._unreported)[:_BATCH]
            try:
                await self.report(batch)
            except StokerError as error:
                if error.status >= 500 or isinstance(error, ProtocolError):
                    if not self._away:
                        _log.warning("exits wait for the gcs: %s", error)
                    self._away = True
                    return False
                # The gcs will never accept these.
                _log.error("the gcs refused %d exits: %s", len(batch), error)
            self._away = False
            for _ in batch:
                self._unreported.popleft()
        return True
