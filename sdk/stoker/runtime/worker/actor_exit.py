"""How an actor ends of its own accord: no new call, its hooks, the reason to the gcs, then the process.

Begun by ``exit_actor()``, by a ``SystemExit`` of its code, by a constructor that raised, by
``__stoker_terminate__``, or by the owner once no process has a handle. What an actor's callers learn
comes from the gcs alone, so all learn the same. ``stoker.kill()`` is no such end: it runs no hook.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import StokerError
from stoker.runtime.actors.info import END_S, SHUTDOWN, TERMINATE
from stoker.runtime.process.current_task import current_task
from stoker.runtime.worker.output import flush_output
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import ActorState, ReportActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import ActorSpec

FINISH_S = 10.0
"""How long calls that run in other threads or coroutines may take to finish."""
_POLL_S = 0.01
_SEND_S = 5.0
_REPORT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an actor ends: its process' exit code, and the cause that its callers are told.

    ``restart``: it did not mean to end for good, so ``max_restarts`` applies.
    """

    exit_code: int
    cause: ErrorInfo
    restart: bool = False


def reason_of(leave: SystemExit, where: str, *, restart: bool) -> Reason:
    """Return why an actor ends whose code raised ``SystemExit``: as Python reads its code.

    None and 0 are an end that was meant; every other code is a failure.
    """
    code = leave.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    number = code if isinstance(code, int) else int(code is not None)
    shown = "" if code is None else repr(code)
    return left_by(f"sys.exit({shown[:200]}) in {where}", number, restart=restart and number != 0)


def left_by(how: str, exit_code: int = 0, *, restart: bool = False) -> Reason:
    """Return the reason of an actor that ended itself."""
    cause = ErrorInfo(
        code="actor_died", message=f"it ended itself: {how}", extra={"exit_code": exit_code}
    )
    return Reason(exit_code & 0xFF, cause, restart)


def told(why: str) -> Reason:
    """Return the reason of an actor that was told to end, by its handle or because it has none."""
    if not why:
        return left_by(f"{TERMINATE} was called")
    return Reason(0, ErrorInfo(code="actor_died", message=why))


def whereabouts() -> str:
    """Return where the calling code runs, in words: its call, or its thread."""
    info = current_task.get()
    if info is not None:
        return info.name
    thread = threading.current_thread()
    return "its constructor" if thread is threading.main_thread() else f"its thread {thread.name}"


class _Host(Protocol):
    """The actor that ends."""

    spec: ActorSpec
    path: str
    calls: CallTable

    def method(self, name: str) -> Callable[..., Any] | None: ...
    def stop(self) -> None: ...
    def send(self, outcome: Outcome) -> None: ...


class ActorEnd:
    """The end of this worker's actor, once.

    ``leave`` sends what is finished and closes the channels behind it.
    """

    def __init__(
        self,
        host: _Host,
        io: IoThread,
        gcs: Client,
        peer_id: str,
        leave: Callable[[], Awaitable[object]],
    ) -> None:
        self.reason: Reason | None = None
        self._host = host
        self._io = io
        self._gcs = gcs
        self._peer_id = peer_id
        self._leave_cluster = leave
        self._lock = threading.Lock()
        self._leaving = False
        self._last: list[Outcome] = []
        """The results of calls that asked for this end: they are sent once the hooks have run."""

    @property
    def begun(self) -> bool:
        """Whether the actor ends."""
        return self.reason is not None

    def begin(self, reason: Reason) -> bool:
        """End the actor for this reason (any thread); False if it ends for another already."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
        self._io.call_soon(self._not_for_ever)
        self._host.stop()
        return True

    def exited(self, work: ReceivedCall, leave: SystemExit) -> None:
        """The code of a call raised ``SystemExit`` (any thread)."""
        self.begin(reason_of(leave, work.template.name, restart=True))

    def broke(self, error: BaseException) -> None:
        """What runs its calls raised, and runs no more of them (any thread)."""
        traceback.print_exception(error)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        said = "".join(traceback.format_exception_only(error)).strip()
        cause = ErrorInfo(code="actor_died", message=f"it could run no more calls\n{said}")
        self.begin(Reason(1, cause, restart=True))

    def holds(self, outcome: Outcome) -> bool:
        """Whether a call's result is not sent now, once the end has begun (any thread).

        Callers of what it made fail learn of the end instead, who asked for it once it is near.
        """
        terminates = outcome.work.template.function == TERMINATE
        if not (outcome.failed or terminates):
            return False
        if not outcome.failed:
            self._last.append(outcome)
        self._host.calls.running.pop(outcome.work.call.task_id, None)
        return True

    # -- the main thread -------------------------------------------------------------------------

    def await_calls(self) -> None:
        """Let the calls that run in other threads finish; their callers get what they return."""
        until_s = time.monotonic() + FINISH_S
        while self._host.calls.running and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def hook(self) -> Any:
        """Call the actor's ``__stoker_shutdown__``; returns its coroutine, if it is one."""
        found = self._host.method(SHUTDOWN) if self.begun else None
        if found is None:
            return None
        try:
            result = found()
        except BaseException:
            traceback.print_exc()
            return None
        return _shown(result) if inspect.isawaitable(result) else None

    def close(self) -> None:
        """Run what is left to run, and end the process. Does not return."""
        atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            flush_output()
        self._io.call_soon(self._leave_soon)
        threading.Event().wait(_SEND_S + _REPORT_S + 5.0)
        os._exit(1)

    # -- the loop thread -------------------------------------------------------------------------

    def _not_for_ever(self) -> None:
        self._io.loop.call_later(END_S, self._leave_soon)

    def _leave_soon(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._io.background.spawn(self._leave(), name="actor-end")

    async def _leave(self) -> None:
        """Send what is finished, tell the gcs why, end the process."""
        assert self.reason is not None
        host = self._host
        try:
            for outcome in self._last:
                host.send(outcome)
            await self._say_goodbye()
            report = ReportActor(
                state=ActorState.DEAD,
                incarnation=host.spec.incarnation,
                worker_id=self._peer_id,
                error=self.reason.cause,
                restart=self.reason.restart,
            )
            with contextlib.suppress(StokerError):  # of a life that is over, or nobody listens
                await self._gcs.call("POST", host.path, report, timeout_s=_REPORT_S)
        finally:
            os._exit(self.reason.exit_code)

    async def _say_goodbye(self) -> None:
        """Close the channels behind what was posted on them: the gcs ends this process once it knows."""
        with contextlib.suppress(StokerError, TimeoutError, OSError):
            async with asyncio.timeout(_SEND_S):
                await self._leave_cluster()


async def _shown(hook: Any) -> None:
    """Await a hook; what it raises is printed."""
    try:
        await hook
    except BaseException:
        traceback.print_exc()
