"""Cancellation and timeout of running calls: by an interrupt of the user's code, else with its process.

A call on the main thread is cancelled as Ctrl-C would do it: the processes that it has started in the
foreground get SIGINT, and so does its own code, whatever handler it has for it (``KeyboardInterrupt``, if
none). A timeout raises its error there instead. The loop thread decides; a signal of our own (SIGUSR1) tells
the main thread, which raises SIGINT only inside :meth:`Cancellation.interruptible`: neither the runtime nor
the next task is ever hit. A task that does not stop by force or timeout ends with its worker. A call of an
actor does not, for its state is also that of other callers: it is asked to stop (a coroutine by
``CancelledError``, a thread by ``is_cancelled()``), and if it still runs after a while, its caller gets an
error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from typing import TYPE_CHECKING, Protocol

from stoker.exceptions import StokerError, TaskCancelledError, TaskTimeoutError
from stoker.runtime.process.stops import STOPS
from stoker.runtime.serialization.exceptions import encode_error
from stoker_wire.messages.data import Cancel, Failed, Retire
from stoker_wire.process import process_tree

if TYPE_CHECKING:
    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker.runtime.worker.call import CallTable, ReceivedCall
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.cluster import ActorSpec
    from stoker_wire.process.call_deadline import DeadlineCell

_SIGNAL_EVERY_S = 0.05
_TIMEOUT_GRACE_S = 3.0
"""A task that runs for so long after its timeout takes its worker with it."""
_SILENT_S = 1.0
"""A worker that lets so much more time pass does not answer."""
_ACTOR_GRACE_S = 1.0
"""A call of an actor that runs for so long after a request to stop is abandoned."""


_STOP_GRACE_S = 5.0
"""How long the stop callbacks of a task may take that ends with its worker."""


class _Actor(Protocol):
    """The actor that this worker hosts, if any."""

    spec: ActorSpec

    def interrupt(self, received: ReceivedCall) -> bool:
        """Stop a running call; False for a sync actor, whose main thread needs a signal."""


class _Worker(Protocol):
    """The worker whose calls are stopped."""

    @property
    def actor(self) -> _Actor | None: ...
    async def retire(self) -> None: ...
    def fail_early(self, received: ReceivedCall, failed: Failed) -> None: ...
    def return_calls(self, channel: Channel, task_ids: list[str]) -> None: ...


class Cancellation:
    """The means by which calls at this worker are stopped."""

    def __init__(
        self,
        io: IoThread,
        events: TaskEvents,
        pending: PendingCalls,
        calls: CallTable,
        worker: _Worker,
        deadline: DeadlineCell,
    ) -> None:
        self._io = io
        self._events = events
        self._pending = pending
        self._calls = calls
        self._worker = worker
        self.deadline = deadline
        """Until when the task that runs ends, if it has a timeout, or this process does because of it."""
        self._main = threading.main_thread().ident
        self._user_code_of: str | None = None

    def install_signal_handler(self) -> None:
        """Install the handler of the signal that interrupts a call (main thread)."""
        signal.signal(signal.SIGUSR1, self._on_signal)

    # -- the main thread -------------------------------------------------------------------------

    def interruptible(self, received: ReceivedCall) -> _Interruptible:
        """Return the span of user code, in which a cancel may raise (main thread only)."""
        return _Interruptible(self, received if threading.get_ident() == self._main else None)

    def _on_signal(self, signum: int, frame: object) -> None:
        received = self._calls.running.get(self._user_code_of or "")
        if received is None or received.stop_error is None:
            return
        self._user_code_of = None
        if isinstance(received.stop_error, TaskTimeoutError):
            raise received.stop_error
        signal.raise_signal(signal.SIGINT)

    def timed_task_began(self, received: ReceivedCall) -> None:
        """Begin a task with a timeout (main thread)."""
        self.deadline.arm(
            received.call.task_id, received.template.timeout_s, _TIMEOUT_GRACE_S + _SILENT_S
        )

    def task_ended(self) -> None:
        """Forget the handler of SIGINT that a task has set: it is not for the next one (main thread)."""
        if _get_handler(signal.SIGINT) is not signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # -- the loop thread -------------------------------------------------------------------------

    def on_cancel(self, message: Cancel) -> None:
        """Stop the call that a caller cancels, and with ``recursive`` its children."""
        task_id = message.task_id
        received = self._calls.get(task_id)
        if received is None:
            return
        error = TaskCancelledError(f"task {received.template.name} ({task_id}) was cancelled")
        if message.force or not isinstance(received.stop_error, TaskTimeoutError):
            self._interrupt(received, error, grace_s=0.0 if message.force else None)
        if message.recursive:  # then, or their errors come to its code before the interrupt
            self._pending.cancel_children(task_id, force=message.force)

    def on_timeout(self, received: ReceivedCall) -> None:
        """Stop a call that has run for its timeout; wait on if it started later."""
        task_id = received.call.task_id
        if task_id in self._calls.queued and not received.started_at_s:
            # The clock of `timeout` starts with the task, not with its arrival.
            self._io.loop.call_later(received.template.timeout_s, self.on_timeout, received)
        elif task_id in self._calls.running:
            left_s = received.started_at_s + received.template.timeout_s - time.time()
            if left_s > 0.001:
                self._io.loop.call_later(left_s, self.on_timeout, received)
                return
            error = TaskTimeoutError(
                f"task {received.template.name} ({task_id}) ran longer than its timeout of "
                f"{received.template.timeout_s:g} s"
            )
            self._interrupt(received, error, grace_s=_TIMEOUT_GRACE_S)

    def _interrupt(
        self, received: ReceivedCall, error: StokerError, *, grace_s: float | None
    ) -> None:
        """Stop a call: drop it, or raise in it; after ``grace_s`` kill this process instead."""
        task_id = received.call.task_id
        if self._calls.queued.pop(task_id, None) is not None:
            self._worker.fail_early(received, encode_error(error))
            return
        received.stop_error = error
        with self._calls.credit_changed:  # a generator may wait there
            self._calls.credit_changed.notify_all()
        actor = self._worker.actor
        if actor is not None:
            if not actor.interrupt(received):
                self._interrupt_main(received)
            self._io.loop.call_later(_ACTOR_GRACE_S, self._abandon, received)
            return
        if grace_s == 0.0:
            self._kill_worker(received)
            return
        self._interrupt_main(received)
        if grace_s is not None:
            self._io.loop.call_later(grace_s, self._kill_worker_if_running, received)

    def _abandon(self, received: ReceivedCall) -> None:
        """Fail a call of an actor that does not stop, so that its caller need not wait for it."""
        actor, error = self._worker.actor, received.stop_error
        if (
            actor is None
            or error is None
            or self._calls.running.get(received.call.task_id) is not received
        ):
            return
        text = (
            f"{error.message}, but its code does not stop\n"
            f"it still runs in actor {actor.spec.class_name} ({actor.spec.actor_id}): let it look at "
            "stoker.get_runtime_context().is_cancelled(), or end the actor with stoker.kill()"
        )
        self._worker.fail_early(received, encode_error(type(error)(text)))
        received.abandoned = True

    def _interrupt_main(self, received: ReceivedCall) -> None:
        """Interrupt a call on the main thread, and before it the processes that it has started.

        They come first, for the main thread may be in C code that waits for one (``os.system``).
        """
        if self._user_code_of == received.call.task_id:
            age_s = time.time() - received.started_at_s
            since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
            pids = process_tree.foreground(os.getpid(), since_s)
            if self._user_code_of == received.call.task_id:  # else some may be of the next task
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGINT)
        self._signal(received)

    def _signal(self, received: ReceivedCall) -> None:
        """Signal the main thread until it has raised.

        One that comes just before it blocks in C is seen only after it has stopped blocking.
        """
        if self._main is not None and self._user_code_of == received.call.task_id:
            signal.pthread_kill(self._main, signal.SIGUSR1)
            self._io.loop.call_later(_SIGNAL_EVERY_S, self._signal, received)

    def _kill_worker_if_running(self, received: ReceivedCall) -> None:
        if received.call.task_id in self._calls.running:
            self._kill_worker(received)

    def _kill_worker(self, received: ReceivedCall) -> None:
        """Fail a call whose code does not stop, return the others, and end this process."""
        self._io.background.spawn(self._leave(received), name="leave")

    async def _leave(self, received: ReceivedCall) -> None:
        self.deadline.leave(received.call.task_id, 2 * _STOP_GRACE_S)
        try:
            # Its caller returns the lease next: by then the nodelet gives this worker no other.
            await self._worker.retire()
            if STOPS.registered and received.stop_error is not None:
                with contextlib.suppress(TimeoutError):
                    reason = received.stop_error.one_line
                    await asyncio.wait_for(STOPS.give(reason, _STOP_GRACE_S), _STOP_GRACE_S)
            if received.call.task_id in self._calls.running:
                assert received.stop_error is not None
                self._worker.fail_early(received, encode_error(received.stop_error))
            unstarted: dict[Channel, list[str]] = {}
            for other in list(self._calls.queued.values()):
                unstarted.setdefault(other.channel, []).append(other.call.task_id)
            for channel, task_ids in unstarted.items():
                self._worker.return_calls(channel, task_ids)
            received.channel.post(Retire())
            self._events.write()
            await asyncio.wait_for(received.channel.close(), 1.0)
        finally:
            os._exit(0)


class _Interruptible:
    """The span of user code on the main thread.

    A class, as contextlib's sets attributes of exceptions, and some of users' are frozen.
    """

    __slots__ = ("_cancellation", "_received")

    def __init__(self, cancellation: Cancellation, received: ReceivedCall | None) -> None:
        self._cancellation = cancellation
        self._received = received

    def __enter__(self) -> None:
        received = self._received
        if received is None:
            return
        self._cancellation._user_code_of = received.call.task_id
        if received.stop_error is not None:
            self._cancellation._user_code_of = None
            raise received.stop_error

    def __exit__(self, *raised: object) -> None:
        if self._received is not None:
            self._cancellation._user_code_of = None
