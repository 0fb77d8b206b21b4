"""The event loops of an async actor: one per concurrency group, so that code that blocks in one group
holds up no other.

The default group's runs on the worker's main thread, each other's on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import StokerError
from stoker.runtime.worker import actor_exit
from stoker.runtime.worker.actor_exit import left_by, reason_of
from stoker_wire.process.event_loop import new_loop

if TYPE_CHECKING:
    from stoker.runtime.worker.actor_exit import ActorEnd
    from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
    from stoker.runtime.worker.invoke import Invoker


_BEGIN_S = 30.0


class _Host(Protocol):
    """The actor whose calls run on the loops."""

    end: ActorEnd
    calls: CallTable
    invoker: Invoker

    @property
    def is_up(self) -> bool: ...
    def callable_of(self, work: ReceivedCall) -> Callable[..., Any]: ...
    def report(self, outcome: Outcome) -> None: ...


class GroupLoop:
    """One concurrency group's event loop; at most ``limit`` of its calls are inside at once."""

    def __init__(self, host: _Host, limit: int) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._gate = asyncio.Semaphore(limit)
        self._over = asyncio.Event()

    # -- the group's thread ----------------------------------------------------------------------

    async def serve(self, begun: Callable[[], object]) -> None:
        """Run calls until :meth:`stop`; ``begun`` is called once.

        Those that run then may finish; what takes too long is cancelled.
        """
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            begun()
            if self._host.end.begun:
                self._over.set()
            await self._over.wait()
            if self.tasks:
                await asyncio.wait(self.tasks.values(), timeout=actor_exit.FINISH_S)
            for task in self.tasks.values():
                task.cancel()

    def _start(self, batch: list[ReceivedCall]) -> None:
        assert self._group is not None
        if self._over.is_set():
            return
        for work in batch:
            task = self._group.create_task(self._run(work), name=work.template.name)
            self.tasks[work.call.task_id] = task

    async def _run(self, work: ReceivedCall) -> None:
        host, calls = self._host, self._host.calls
        task_id = work.call.task_id
        began = time.perf_counter()
        try:
            async with self._gate:
                if host.end.begun or calls.queued.pop(task_id, None) is None:
                    return
                calls.running[task_id] = work
                outcome = await host.invoker.invoke_async(work, host.callable_of(work))
        except asyncio.CancelledError as error:
            if host.end.begun or calls.queued.pop(task_id, None) is None:
                return
            outcome = host.invoker.failure(work, error, began)
        finally:
            self.tasks.pop(task_id, None)
        host.report(outcome)

    # -- any thread ------------------------------------------------------------------------------

    def submit(self, batch: list[ReceivedCall]) -> None:
        """Start calls, in order."""
        self._tell(self._start, batch)

    def cancel(self, task_id: str) -> bool:
        """Cancel a call; False if it is not here."""
        task = self.tasks.get(task_id)
        if task is None:
            return False
        self._tell(task.cancel)
        return True

    def stop(self) -> None:
        """Take no more calls, and cancel those that run."""
        self._tell(self._over.set)

    def _tell(self, what: Callable[..., object], *args: Any) -> None:
        """Have the group's thread call this, unless it ended before."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(what, *args)


def start_thread(host: _Host, group: GroupLoop, name: str) -> threading.Thread:
    """Run a group on a thread of its own; returns once it takes calls, StokerError if it never does."""
    begun = threading.Event()
    thread = threading.Thread(
        target=drive, args=(host, group.serve(begun.set)), name=f"stoker-actor-{name}", daemon=True
    )
    thread.start()
    if not begun.wait(_BEGIN_S):
        raise StokerError(
            f"the event loop of concurrency group {name!r} did not begin within {_BEGIN_S:g} s\n"
            "the worker's log says why (stoker logs), for instance a limit on threads or open "
            "files"
        )
    return thread


def drive(host: _Host, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a new loop of the calling thread.

    A ``SystemExit`` in a task that user code made leaves the loop: it ends the actor, in order. So
    does what the coroutine raises: nobody would run the calls that come.
    """
    runner = asyncio.Runner(loop_factory=new_loop)
    with contextlib.suppress(SystemExit, KeyboardInterrupt), runner:  # again, as the loop closes
        loop = runner.get_loop()
        task = loop.create_task(work, name="actor")
        while not task.done():
            try:
                loop.run_until_complete(task)
            except SystemExit as leave:
                where = "a task of its event loop"
                host.end.begin(reason_of(leave, where, restart=host.is_up))
            except KeyboardInterrupt:
                how = "KeyboardInterrupt in a task of its event loop"
                host.end.begin(left_by(how, 130, restart=host.is_up))
            except BaseException as error:
                host.end.broke(error)
