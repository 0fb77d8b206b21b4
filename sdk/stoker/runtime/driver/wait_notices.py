"""Notices of long waits in a driver: once per cause on stderr, and when a wait is interrupted.

``get``, ``wait``, ``await`` and iteration over a generator register their waits in :class:`DriverWaits`.
The runtime's tick checks those that are older than the setting ``wait_notice_s``, finds the causes that
delay their tasks, and has the scheduler explain them. Tasks that run are no cause: a program may wait
for them as long as it likes. Workers print nothing: their driver waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker.runtime.objects.table import describe_wait
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.stderr import write_soon
from stoker.runtime.tasks.task_spec import PendingTask, Phase, unready_argument
from stoker_wire.messages.control import Explanation, Fit

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from stoker.runtime.actors.calls import ActorCalls
    from stoker.runtime.job import JobContext
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.objects.waiters import ThreadWaiter
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.leases import Leases
    from stoker_wire.http.client.client import Client

_EXPLAIN_S = 5.0
_ASK_S = 2.0
"""How long a get that timed out waits for the explanation; a newer one is not asked for within it."""
_EXPLAINED_FROM_S = 1.0
"""A get with a shorter timeout may be one of a loop that polls: it asks nobody."""
_MAX_ANSWERS = 100
_MAX_NAMES = 3
_MAX_ENTRIES = 10_000
"""The number of objects of one wait that are looked at."""
COUNTED = contextvars.ContextVar("COUNTED", default=False)
"""Whether whoever waits shows already how many of the objects are there."""


class Wait:
    """One wait: the function that waits, its objects, its beginning; of a thread how many it waits for."""

    __slots__ = ("began_s", "cell", "due_s", "entries", "is_counted", "total", "waiter", "what")

    def __init__(
        self, what: str, entries: Sequence[Entry], due_s: float, waiter: ThreadWaiter | None = None
    ) -> None:
        self.what = what
        self.entries = entries
        self.waiter = waiter
        self.total = waiter.missing if waiter is not None else 0
        self.cell = CELLS.now()
        self.is_counted = COUNTED.get()
        self.began_s = time.monotonic()
        self.due_s = self.began_s + due_s


class DriverWaits:
    """The waits of this driver: a :class:`~stoker.runtime.objects.waiters.Waits`."""

    def __init__(self, notice_s: float) -> None:
        self.notice_s = notice_s
        self.current: dict[Wait, None] = {}
        self.ask: Callable[[Sequence[Entry]], str] | None = None
        """Has the scheduler explain why objects are not there."""

    def wait(
        self, waiter: ThreadWaiter, timeout_s: float | None, what: str, entries: Sequence[Entry]
    ) -> bool:
        """Wait for objects; False if the time passed."""
        wait = Wait(what, entries, self.notice_s, waiter)
        self.current[wait] = None
        try:
            return waiter.wait(timeout_s)
        except KeyboardInterrupt as stop:
            _explain_interrupt(wait, stop)
            raise
        finally:
            del self.current[wait]

    async def wait_async(
        self, future: asyncio.Future[None], what: str, entries: Sequence[Entry]
    ) -> None:
        """Wait for objects in a coroutine of a user's loop."""
        wait = Wait(what, entries, self.notice_s)
        self.current[wait] = None
        try:
            await future
        finally:
            del self.current[wait]

    def why(self, entries: Sequence[Entry], waited_s: float) -> str:
        """Return the scheduler's explanation; of a short wait, which may be one of a loop's, none."""
        if self.ask is None or waited_s < _EXPLAINED_FROM_S:
            return ""
        return self.ask(entries)

    def blocked(self) -> contextlib.AbstractContextManager[None]:
        """Return an empty context: a driver has no lease that others could use."""
        return contextlib.nullcontext()


def _explain_interrupt(wait: Wait, stop: BaseException) -> None:
    """Add to the exception that ends a wait what it waited for."""
    missing = [e for e in wait.entries if e.location is None]
    if missing:
        took_s = time.monotonic() - wait.began_s
        stop.add_note(
            f"stoker: {wait.what} had waited {took_s:.1f} s for {len(missing)} of "
            f"{len(wait.entries)} objects: " + describe_wait(missing).replace("\n", "; ")
        )


class WaitNotices:
    """The notices of long waits, one per cause."""

    def __init__(
        self,
        waits: DriverWaits,
        io: IoThread,
        gcs: Client,
        job: JobContext,
        leases: Leases,
        actors: ActorCalls,
    ) -> None:
        self._waits = waits
        self._io = io
        self._gcs = gcs
        self._job = job
        self._leases = leases
        self._actors = actors
        self._noticed: set[Hashable] = set()
        self._answers: dict[Hashable, tuple[float, str]] = {}
        """Cause -> when it was explained to a get that timed out, and how."""
        waits.ask = self.why

    def tick(self) -> None:
        """Check the waits that last (loop thread)."""
        after_s = self._waits.notice_s
        if not self._waits.current or not after_s:
            return
        now_s = time.monotonic()
        for wait in list(self._waits.current):
            if wait.due_s <= now_s:
                wait.due_s = now_s + after_s
                self._check(wait, now_s - wait.began_s)

    def why(self, entries: Sequence[Entry]) -> str:
        """Return in lines why objects are not there, as the scheduler explains the first cause."""
        try:
            return self._io.run(self._why(entries), _ASK_S)
        except (StokerError, TimeoutError):
            return ""

    async def _why(self, entries: Sequence[Entry]) -> str:
        causes = self._group_by_cause(entries[:_MAX_ENTRIES])
        if not causes:
            return ""
        key, tasks = next(iter(causes.items()))
        now_s = time.monotonic()
        at_s, text = self._answers.get(key, (-math.inf, ""))
        if now_s - at_s > _ASK_S:
            text = await self._explain(tasks, remedies=True)
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            self._answers[key] = (now_s, text)
        return f"why: {text}\nmore: stoker explain {self._subject(tasks)}"

    def _check(self, wait: Wait, waited_s: float) -> None:
        for key, tasks in self._group_by_cause(wait.entries[:_MAX_ENTRIES]).items():
            if key not in self._noticed:
                self._noticed.add(key)
                self._io.background.spawn(
                    self._print_notice(wait.what, waited_s, tasks), name="notice"
                )

    def _group_by_cause(self, entries: Iterable[Entry]) -> dict[Hashable, list[PendingTask]]:
        """Return the tasks that wait, by cause; arguments are followed to their tasks."""
        causes: dict[Hashable, list[PendingTask]] = {}
        seen: set[str] = set()
        pending = [e.task for e in entries]  # of those that are settled there is none
        while pending:
            task = pending.pop()
            if not isinstance(task, PendingTask) or task.task_id in seen:
                continue
            seen.add(task.task_id)
            key: Hashable = None
            missing = [d._entry.task for d in task.deps if d._entry.location is None]
            if missing:
                pending += missing
            elif task.spec.actor_id and task.phase is not Phase.SENT:
                connection = self._actors.get(task.spec.actor_id)
                if connection is None:
                    continue
                if (
                    connection.constructor_call is not None
                    and (missed := unready_argument(connection.constructor_call)) is not None
                ):
                    pending.append(missed.task)  # an argument of its constructor
                elif not connection.is_up:
                    key = ("actor", connection.name)
                elif (ahead := connection.calls.ahead_of(task)) is not None:
                    pending.append(ahead)
            elif task.phase is Phase.QUEUED:
                key = ("class", task.spec.demand_key)
            elif task.phase is Phase.REGISTERING:
                key = ("function", task.spec.function)
            elif task.phase is Phase.WAITING and not task.spec.actor_id:
                key = ("retry", task.spec.function)
            if key is not None:
                causes.setdefault(key, []).append(task)
        return causes

    async def _print_notice(self, what: str, waited_s: float, tasks: list[PendingTask]) -> None:
        try:
            async with asyncio.timeout(_EXPLAIN_S):
                why = await self._explain(tasks)
        except (StokerError, TimeoutError):
            why = tasks[0].describe()
        if all(task.phase in (Phase.SENT, Phase.ENDED) for task in tasks):
            return  # all of them started meanwhile
        line = (
            f"stoker: {what} has waited {waited_s:.0f} s for {_task_names(tasks)}: {why}. "
            f"More: stoker explain {self._subject(tasks)}\n"
        )
        write_soon(line)

    def _subject(self, tasks: list[PendingTask]) -> str:
        """Return the id to ask more of."""
        actors = {task.spec.actor_id for task in tasks}
        if len(tasks) > 1 and len(actors) != 1:
            return self._job.job_id
        return tasks[0].spec.actor_id or tasks[0].task_id

    async def _explain(self, tasks: list[PendingTask], *, remedies: bool = False) -> str:
        first, gcs = tasks[0], self._gcs
        if first.spec.actor_id:
            explanation = await gcs.call(
                "GET", f"/v1/actors/{first.spec.actor_id}/explain", reply=Explanation, retry=False
            )
            return _one_line(explanation)
        reason = self._leases.connection_error(first.spec.demand_key)
        if reason or first.phase is not Phase.QUEUED:
            return first.describe()
        explanation = await gcs.call(
            "POST",
            "/v1/explain",
            first.spec.demand,
            reply=Explanation,
            query={"remedies": True} if remedies else None,
            retry=False,
        )
        return _one_line(explanation)


def _task_names(tasks: list[PendingTask]) -> str:
    """Name the tasks of one cause: "4 tasks (f, g)", "task f"."""
    counts: dict[str, None] = dict.fromkeys(task.spec.name for task in tasks)
    names = ", ".join(list(counts)[:_MAX_NAMES]) + (", ..." if len(counts) > _MAX_NAMES else "")
    what = "call" if tasks[0].spec.actor_id else "task"
    return f"{what} {names}" if len(tasks) == 1 else f"{len(tasks)} {what}s ({names})"


def _one_line(explanation: Explanation) -> str:
    """Return an explanation in one line: the demand, and what is missing where."""
    demand, verdicts = explanation.demand, explanation.verdicts
    helps = "".join(f"; {remedy.text}" for remedy in explanation.remedies[:1])
    if demand is None or not verdicts or verdicts[0].fit is Fit.FITS:
        return explanation.summary + helps
    alike = [v for v in verdicts if v.detail == verdicts[0].detail]
    where = verdicts[0].node_id if len(verdicts) == 1 else f"{len(alike)} of {len(verdicts)} nodes"
    return f"{demand.name or 'it'}: {verdicts[0].detail} ({where}){helps}"
