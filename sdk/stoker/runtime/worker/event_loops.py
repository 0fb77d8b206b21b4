"""The event loops of an async actor: one per concurrency group, so that code that blocks in one group
delays no other.

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
from stoker.runtime.worker.actor_exit import self_exit_reason, system_exit_reason
from stoker_wire.process.event_loop import new_loop

if TYPE_CHECKING:
    from stoker.runtime.net.direct_reader import DirectReader
    from stoker.runtime.worker.actor_exit import ActorExit
    from stoker.runtime.worker.actor_state.state_saver import StateSaver
    from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
    from stoker.runtime.worker.invoke import Invoker


_START_S = 30.0


class _Host(Protocol):
    """The actor whose calls run on the loops."""

    exit: ActorExit
    calls: CallTable
    invoker: Invoker
    reader: DirectReader
    is_up: bool
    saver: StateSaver | None

    def callable_of(self, received: ReceivedCall) -> Callable[..., Any]: ...
    def report(self, outcome: Outcome) -> None: ...
    def drop(self, outcome: Outcome) -> None: ...


class ConcurrencyGroupLoop:
    """One concurrency group's event loop; at most ``limit`` of its calls run at once.

    One that ``reads`` reads the channel of its last caller by itself, where the next call may come from.
    """

    def __init__(self, host: _Host, limit: int, *, reads: bool = False) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._host = host
        self._reads = reads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._slots = asyncio.Semaphore(limit)
        self._stopping = asyncio.Event()

    # -- the group's thread ----------------------------------------------------------------------

    async def serve(self, on_started: Callable[[], object]) -> None:
        """Run calls until :meth:`stop`; call ``on_started`` once it takes them.

        Those that run at the stop may finish; those that take too long are cancelled.
        """
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            on_started()
            if self._host.exit.begun:
                self._stopping.set()
            await self._stopping.wait()
            if self.tasks:
                await asyncio.wait(self.tasks.values(), timeout=self._host.exit.finish_s)
            for task in self.tasks.values():
                task.cancel()

    def _start(self, batch: list[ReceivedCall]) -> None:
        assert self._group is not None
        if self._stopping.is_set():
            return
        for received in batch:
            task = self._group.create_task(self._run(received), name=received.template.name)
            self.tasks[received.call.task_id] = task

    async def _run(self, received: ReceivedCall) -> None:
        host, calls = self._host, self._host.calls
        began = time.perf_counter()
        try:
            async with self._slots:
                if host.exit.begun or not calls.take(received):
                    return
                outcome = await host.invoker.invoke_async(received, host.callable_of(received))
                saver = host.saver
                if saver is not None and saver.is_due and not await self._saved(saver):
                    host.drop(outcome)
                    return
        except asyncio.CancelledError as error:
            if host.exit.begun or not calls.take(received):
                return
            outcome = host.invoker.failure(received, error, began)
        finally:
            self.tasks.pop(received.call.task_id, None)
        host.report(outcome)
        if self._reads and not self.tasks and self._loop is not None:
            host.reader.read_on(self._loop, received.channel)

    async def _saved(self, saver: StateSaver) -> bool:
        """Return once the state after a call is saved; False if the call is not to be answered.

        It has ended, so a cancel comes too late; but not that of an exit that does not wait.
        """
        saving = asyncio.wrap_future(saver.request())
        while not saving.done():
            try:
                await asyncio.wait([saving])
            except asyncio.CancelledError:
                reason = self._host.exit.reason
                if reason is not None and not reason.moves:
                    raise
        return not saver.is_fenced

    # -- any thread ------------------------------------------------------------------------------

    def submit(self, batch: list[ReceivedCall]) -> None:
        """Start calls, in order."""
        self._call_soon_threadsafe(self._start, batch)

    def cancel(self, task_id: str) -> bool:
        """Cancel a call; False if it is not here."""
        task = self.tasks.get(task_id)
        if task is None:
            return False
        self._call_soon_threadsafe(task.cancel)
        return True

    def stop(self) -> None:
        """Take no more calls, and cancel those that run."""
        self._call_soon_threadsafe(self._stopping.set)

    def _call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        """Call this on the group's thread, unless that has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(callback, *args)


def start_thread(host: _Host, group: ConcurrencyGroupLoop, name: str) -> threading.Thread:
    """Run a group on a thread of its own; return once it takes calls, StokerError if it never does."""
    started = threading.Event()
    thread = threading.Thread(
        target=run_loop,
        args=(host, group.serve(started.set)),
        name=f"stoker-actor-{name}",
        daemon=True,
    )
    thread.start()
    if not started.wait(_START_S):
        raise StokerError(
            f"the event loop of concurrency group {name!r} did not begin within {_START_S:g} s\n"
            "the worker's log says why (stoker logs), for instance a limit on threads or open "
            "files"
        )
    return thread


def run_loop(host: _Host, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a new loop of the calling thread.

    A ``SystemExit`` in a task that user code made leaves the loop: the actor exits in order. So it does
    where the coroutine raises: nothing would run the calls that come.
    """
    runner = asyncio.Runner(loop_factory=new_loop)
    with contextlib.suppress(SystemExit, KeyboardInterrupt), runner:  # again, as the loop closes
        loop = runner.get_loop()
        task = loop.create_task(coroutine, name="actor")
        while not task.done():
            try:
                loop.run_until_complete(task)
            except SystemExit as leave:
                where = "a task of its event loop"
                host.exit.begin(system_exit_reason(leave, where, restart=host.is_up))
            except KeyboardInterrupt:
                how = "KeyboardInterrupt in a task of its event loop"
                host.exit.begin(self_exit_reason(how, 130, restart=host.is_up))
            except BaseException as error:
                host.exit.on_crash(error)
