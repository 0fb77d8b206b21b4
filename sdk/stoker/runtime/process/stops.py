"""The stop of this process, as its user's code sees it: a notice, and callbacks that save what must stay.

One per process. A worker is given notice by its nodelet, a driver by SIGTERM. Callbacks run one after the
other on a thread of their own, beside the code that is to stop, for that may be anywhere; coroutine functions
run on the event loop in which they were registered, between two steps of what runs there.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from stoker.exceptions import BadRequestError
from stoker.runtime.process.current_task import current_task

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Callback = Callable[["PreemptionNotice"], Any]


class PreemptionNotice:
    """A notice of the end of this worker, given or still to come.

    ``reason`` says what it is for, ``deadline_s`` (seconds since 1970) when SIGTERM comes, if it is known. In
    coroutines it can be awaited.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.deadline_s: float | None = None
        self._given = threading.Event()
        self._lock = threading.RLock()  # a handler of signals may run inside
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        return (
            f"PreemptionNotice({self.reason!r})" if self.is_set() else "PreemptionNotice(not set)"
        )

    def is_set(self) -> bool:
        """Return whether the notice was given."""
        return self._given.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the notice is given; return False if ``timeout`` seconds passed first."""
        return self._given.wait(timeout)

    def __await__(self) -> Generator[Any, None, PreemptionNotice]:
        with self._lock:
            future = None
            if not self.is_set():
                loop = _running_loop()
                future = loop.create_future()
                self._waiting.append((loop, future))
        if future is not None:
            yield from future
        return self

    def _give(self, reason: str, grace_s: float | None) -> None:
        with self._lock:
            self.reason = reason
            self.deadline_s = None if grace_s is None else time.time() + grace_s
            self._given.set()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, None)


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio  # heavy, and this module is imported by all that imports stoker

    return asyncio.get_running_loop()


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


class _Registration(NamedTuple):
    """A callback, the task that registered it, and where it is to run."""

    callback: Callback
    task_id: str
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop | None


class Stops:
    """The notice of this process, and the callbacks that are to run when it is given."""

    def __init__(self) -> None:
        self.notice = PreemptionNotice()
        self.registered: list[_Registration] = []
        self.is_worker = False
        self._lock = threading.RLock()  # a handler of signals may run inside

    def lease_began(self) -> None:
        """Forget the notice and the callbacks of the lease before (a worker's loop thread)."""
        self.is_worker = True
        with self._lock:
            self.notice, self.registered = PreemptionNotice(), []

    def add(self, callback: Callback) -> None:
        """Register a callback until the end of the task that runs here; of an actor, until its end."""
        info = current_task.get()
        task_id = info.task_id if info is not None and not info.actor_id else ""
        loop = None
        if inspect.iscoroutinefunction(callback):
            with contextlib.suppress(RuntimeError):  # else it gets a loop of its own
                loop = _running_loop()
        if not self.is_worker and not self.registered:
            self._follow_sigterm()
        one = _Registration(callback, task_id, contextvars.copy_context(), loop)
        with self._lock:
            self.registered.append(one)

    def task_ended(self, task_id: str) -> None:
        """Forget the callbacks of a task."""
        with self._lock:
            self.registered = [one for one in self.registered if one.task_id != task_id]

    async def give(self, reason: str, grace_s: float) -> int:
        """Give the notice; return, when the callbacks have run, how many there were."""
        loop = _running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def run() -> None:
            count = self._run_callbacks()
            loop.call_soon_threadsafe(_settle, done, count)

        self.notice._give(reason, grace_s)
        # Not of a pool: nobody waits at the end of this process for a callback that hangs.
        threading.Thread(target=run, name="on-stop", daemon=True).start()
        return await done

    def _run_callbacks(self) -> int:
        with self._lock:
            registered = list(self.registered)
        for one in registered:
            try:
                one.context.run(self._call, one)
            except BaseException:
                traceback.print_exc()  # the others save what they have to all the same
        return len(registered)

    def _call(self, one: _Registration) -> None:
        result = one.callback(self.notice)
        if not inspect.iscoroutine(result):
            return
        import asyncio

        if one.loop is None or not one.loop.is_running():
            asyncio.run(result)
        else:
            asyncio.run_coroutine_threadsafe(result, one.loop).result()

    def _follow_sigterm(self) -> None:
        """Make SIGTERM the notice of this driver: run the callbacks, then exit."""
        if threading.current_thread() is not threading.main_thread():
            raise BadRequestError(
                "on_stop() was called by a thread of a driver\ncall it first from the main thread: it "
                "sets the handler of SIGTERM"
            )

        def leave() -> None:
            raise SystemExit(128 + signal.SIGTERM)

        def on_sigterm(signum: int, frame: object) -> None:
            if self.notice.is_set():
                return
            self.notice._give("this process was sent SIGTERM", None)
            try:
                loop = _running_loop()
            except RuntimeError:
                self._run_callbacks()
                leave()
            else:  # it must go on: coroutine functions run on it
                threading.Thread(
                    target=run_beside, args=(loop,), name="on-stop", daemon=True
                ).start()

        def run_beside(loop: asyncio.AbstractEventLoop) -> None:
            self._run_callbacks()
            loop.call_soon_threadsafe(leave)

        signal.signal(signal.SIGTERM, on_sigterm)


STOPS = Stops()
