"""The waits of a worker's task: others may have its CPU, and the calls behind it, meanwhile.

The scheduler gets the latest state until it has it; flips in between are skipped. A long wait is reported
again and again, ever more rarely: a scheduler that takes over learns of it from nobody else. Any thread of
the task waits, the loop thread reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker_wire.messages.cluster import BlockLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.objects.waiters import ThreadWaiter
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.call import CallTable

_BRIEF_S = 0.002
"""A wait shorter than this does not give the CPU back: telling the scheduler would cost more."""
_REPORT_S = 10.0
_REPEAT_S = (2.0, 10.0)
"""The first pause between reports of one wait, doubled each time, and the longest."""


class WorkerWaits:
    """The waits of this worker: a :class:`~stoker.runtime.objects.waiters.Waits`."""

    def __init__(
        self, io: IoThread, clients: ClusterClients, job: JobContext, calls: CallTable
    ) -> None:
        self._io = io
        self._clients = clients
        self._job = job
        self._calls = calls
        self._main = threading.main_thread().ident
        self._waits: set[object] = set()
        """One member per wait of the running task: its main thread's, its threads', its coroutines'."""
        self._reported = False
        self._reporting = False
        self._pause_s = _REPEAT_S[0]
        self._repetition: asyncio.TimerHandle | None = None
        self._on_blocked: Callable[[], object] | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether the running task is blocked."""
        return bool(self._waits)

    def on_blocked(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the loop thread whenever a task begins to wait."""
        self._on_blocked = callback

    # -- the threads of the task -----------------------------------------------------------------

    def wait(
        self, waiter: ThreadWaiter, timeout_s: float | None, what: str, entries: Sequence[Entry]
    ) -> bool:
        """Wait for objects, without the CPU unless it is brief; False if the time passed."""
        if not self._is_on_task_thread():
            return waiter.wait(timeout_s)
        brief = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        if waiter.wait(brief):
            return True
        with self._blocking():
            return waiter.wait(None if timeout_s is None else timeout_s - brief)

    async def wait_async(
        self, future: asyncio.Future[None], what: str, entries: Sequence[Entry]
    ) -> None:
        """Wait for objects in a coroutine of a user's loop.

        Other calls of an async actor go on meanwhile; a task that is a coroutine gives its CPU back.
        """
        if self._job.actor is not None or not self._is_on_task_thread():
            await future
        elif not (await asyncio.wait([future], timeout=_BRIEF_S))[0]:
            with self._blocking():
                await future

    def why(self, entries: Sequence[Entry], waited_s: float) -> str:
        """Return nothing: the driver is told what its tasks wait for."""
        return ""

    def blocked(self) -> contextlib.AbstractContextManager[None]:
        """Return the context inside which the calling thread waits by means of its own."""
        return self._blocking() if self._is_on_task_thread() else contextlib.nullcontext()

    def _is_on_task_thread(self) -> bool:
        """Return whether a wait of the calling thread gives the CPU back.

        The main thread's does, and that of the threads that a task made.
        """
        if self._job.lease is None:
            return False
        if threading.get_ident() == self._main:
            return True
        return self._job.actor is None and bool(self._calls.running)

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        wait = object()
        self._waits.add(wait)
        self._io.call_soon(self._on_change)
        try:
            yield
        finally:
            self._waits.discard(wait)
            self._io.call_soon(self._on_change)

    def task_ended(self) -> None:
        """Forget the waits of threads that the task left behind (main thread)."""
        if self._waits:
            self._waits.clear()
            self._io.call_soon(self._on_change)

    # -- the loop thread -------------------------------------------------------------------------

    def lease_began(self) -> None:
        """Begin a lease, whose CPU is taken."""
        self._reported = False

    def _on_change(self) -> None:
        if self._waits and self._on_blocked is not None:
            self._on_blocked()
        self._pause_s = _REPEAT_S[0]
        self._begin_report()

    def _begin_report(self, *, again: bool = False) -> None:
        if not self._reporting:
            self._reporting = True
            self._io.background.spawn(self._report(again=again), name="blocked")

    async def _report(self, *, again: bool) -> None:
        try:
            while self._job.lease is not None and (again or self._reported != bool(self._waits)):
                again, blocked = False, bool(self._waits)
                try:
                    await self._clients.scheduler_call(
                        f"/v1/leases/{self._job.lease.lease_id}/blocked",
                        BlockLease(blocked=blocked),
                        None,
                        timeout_s=_REPORT_S,
                    )
                except StokerError:
                    return
                self._reported = blocked
        finally:
            self._reporting = False
            if self._repetition is not None:
                self._repetition.cancel()
            if self._waits or self._reported:
                self._repetition = self._io.loop.call_later(self._pause_s, self._repeat)
                self._pause_s = min(2 * self._pause_s, _REPEAT_S[1])

    def _repeat(self) -> None:
        """Report a wait that goes on; and its end, if that could not be reported."""
        self._begin_report(again=bool(self._waits))
