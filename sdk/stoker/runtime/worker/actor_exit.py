"""The orderly exit of an actor: no new call, its hooks, the reason to the gcs, then the process.

Begun by ``exit_actor()``, by a ``SystemExit`` of its code, by a constructor that raised, by
``__stoker_terminate__``, by the owner once no process has a handle, or by a move. The actor's callers learn
the reason from the gcs alone, so all learn the same. ``stoker.kill()`` is no such exit: it runs no hook.
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

from stoker.exceptions import PreemptedError, StokerError
from stoker.runtime.actors.info import END_S, RAY_SHUTDOWN, SHUTDOWN, TERMINATE
from stoker.runtime.process.current_task import current_task
from stoker.runtime.worker.output import flush_output
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import ActorState, ReportActor
from stoker_wire.process.background import first_cause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import ActorSpec

FINISH_S = 10.0
"""The time that calls in other threads or coroutines have to finish."""
_POLL_S = 0.01
_MOVE_S = 7 * 86_400.0
"""The same for an actor that is moved: its nodelet ends it when its node must be empty."""
_SEND_S = 5.0
_REPORT_S = 60.0


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The reason for which an actor exits: its process' exit code, and the cause for its callers.

    ``restart``: it did not mean to end for good, so ``max_restarts`` applies. ``moves``: it is started
    elsewhere, and what runs has all the time that its nodelet gives it. ``reports``: the gcs learns the
    reason from here, not from the nodelet.
    """

    exit_code: int
    cause: ErrorInfo
    restart: bool = False
    moves: bool = False
    reports: bool = True


def system_exit_reason(leave: SystemExit, where: str, *, restart: bool) -> ExitReason:
    """Return the reason of an actor whose code raised ``SystemExit``, with its code as Python reads it.

    None and 0 are an intended exit; every other code is a failure.
    """
    code = leave.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    number = code if isinstance(code, int) else int(code is not None)
    code_text = "" if code is None else repr(code)
    return self_exit_reason(
        f"sys.exit({code_text[:200]}) in {where}", number, restart=restart and number != 0
    )


def self_exit_reason(how: str, exit_code: int = 0, *, restart: bool = False) -> ExitReason:
    """Return the reason of an actor that ended itself."""
    cause = ErrorInfo(
        code="actor_died", message=f"it ended itself: {how}", extra={"exit_code": exit_code}
    )
    return ExitReason(exit_code & 0xFF, cause, restart)


def requested_reason(why: str) -> ExitReason:
    """Return the reason of an actor that was asked to end, by its handle or because it has none."""
    if not why:
        return self_exit_reason(f"{TERMINATE} was called")
    return ExitReason(0, ErrorInfo(code="actor_died", message=why))


def moved_reason(why: str) -> ExitReason:
    """Return the reason of an actor that is to leave its node."""
    cause = ErrorInfo(code=PreemptedError.code, message=f"it was moved as {why}")
    return ExitReason(0, cause, restart=True, moves=True)


def noticed_reason(why: str) -> ExitReason:
    """Return the reason of an actor that its nodelet has given notice, and ends."""
    return ExitReason(
        0, ErrorInfo(code="actor_died", message=why), restart=True, moves=True, reports=False
    )


def calling_code() -> str:
    """Return the name of the code that calls this: its call, or its thread."""
    info = current_task.get()
    if info is not None:
        return info.name
    thread = threading.current_thread()
    return "its constructor" if thread is threading.main_thread() else f"its thread {thread.name}"


class _Host(Protocol):
    """The actor that exits."""

    spec: ActorSpec
    path: str
    calls: CallTable

    def method(self, name: str) -> Callable[..., Any] | None: ...
    def stop(self) -> None: ...
    def send(self, outcome: Outcome) -> None: ...


class ActorExit:
    """The exit of this worker's actor; it happens once.

    ``leave`` sends finished results and closes the channels behind them.
    """

    def __init__(
        self,
        host: _Host,
        io: IoThread,
        gcs: Client,
        peer_id: str,
        leave: Callable[[], Awaitable[object]],
    ) -> None:
        self.reason: ExitReason | None = None
        self._host = host
        self._io = io
        self._gcs = gcs
        self._peer_id = peer_id
        self._leave_cluster = leave
        self._lock = threading.Lock()
        self._leaving = False
        self._withheld: list[Outcome] = []
        """The results of calls that asked for this exit: they are sent once the hooks have run."""

    @property
    def finish_s(self) -> float:
        """The time that running calls have to finish."""
        return _MOVE_S if self.reason is not None and self.reason.moves else FINISH_S

    @property
    def begun(self) -> bool:
        """Whether the exit has begun."""
        return self.reason is not None

    def begin(self, reason: ExitReason) -> bool:
        """Begin the exit for this reason (any thread); False if it has begun for another."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
        if not reason.moves:
            self._io.call_soon(self._limit_duration)
        self._host.stop()
        return True

    def on_system_exit(self, received: ReceivedCall, leave: SystemExit) -> None:
        """Begin the exit because a call raised ``SystemExit`` (any thread)."""
        self.begin(system_exit_reason(leave, received.template.name, restart=True))

    def on_crash(self, error: BaseException) -> None:
        """Begin the exit because a thread or loop that runs calls failed (any thread)."""
        traceback.print_exception(error)
        text = "".join(traceback.format_exception_only(first_cause(error))).strip()
        cause = ErrorInfo(code="actor_died", message=f"it could run no more calls\n{text}")
        self.begin(ExitReason(1, cause, restart=True))

    def withholds(self, outcome: Outcome) -> bool:
        """Return whether a result is not sent now that the exit has begun (any thread).

        A call that the exit made fail gets the reason from the gcs instead of its error; one that
        asked for the exit is answered once the hooks have run.
        """
        terminates = outcome.received.template.function == TERMINATE
        moves = self.reason is not None and self.reason.moves
        if not (terminates or (outcome.failed and not moves)):
            return False
        if not outcome.failed:
            self._withheld.append(outcome)
        self._host.calls.running.pop(outcome.received.call.task_id, None)
        return True

    # -- the main thread -------------------------------------------------------------------------

    def wait_for_calls(self) -> None:
        """Wait for the calls that run in other threads; their callers get their results."""
        until_s = time.monotonic() + self.finish_s
        while self._host.calls.running and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def call_shutdown_hook(self) -> Any:
        """Call the actor's ``__stoker_shutdown__``; return its coroutine, if it is one."""
        hook = None
        if self.begun:
            hook = self._host.method(SHUTDOWN) or self._host.method(RAY_SHUTDOWN)
        if hook is None:
            return None
        try:
            result = hook()
        except BaseException:
            traceback.print_exc()
            return None
        return _print_errors_of(result) if inspect.isawaitable(result) else None

    def exit_process(self) -> None:
        """Run the ``atexit`` functions, and end the process. Does not return."""
        atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            flush_output()
        self._io.call_soon(self._leave_once)
        threading.Event().wait(_SEND_S + _REPORT_S + 5.0)
        os._exit(1)

    # -- the loop thread -------------------------------------------------------------------------

    def _limit_duration(self) -> None:
        self._io.loop.call_later(END_S, self._leave_once)

    def _leave_once(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._io.background.spawn(self._leave(), name="actor-end")

    async def _leave(self) -> None:
        """Send finished results, report the reason to the gcs, end the process."""
        assert self.reason is not None
        host = self._host
        try:
            for outcome in self._withheld:
                host.send(outcome)
            await self._close_channels()
            report = ReportActor(
                state=ActorState.DEAD,
                incarnation=host.spec.incarnation,
                worker_id=self._peer_id,
                error=self.reason.cause,
                restart=self.reason.restart,
            )
            if self.reason.reports:
                with contextlib.suppress(
                    StokerError
                ):  # a later incarnation lives, or no gcs answers
                    await self._gcs.call("POST", host.path, report, timeout_s=_REPORT_S)
        finally:
            os._exit(self.reason.exit_code)

    async def _close_channels(self) -> None:
        """Close the channels behind what was posted on them, before the gcs has this process ended."""
        with contextlib.suppress(StokerError, TimeoutError, OSError):
            async with asyncio.timeout(_SEND_S):
                await self._leave_cluster()


async def _print_errors_of(call_shutdown_hook: Any) -> None:
    """Await a hook; print what it raises."""
    try:
        await call_shutdown_hook
    except BaseException:
        traceback.print_exc()
