"""Stopping a task that runs: cancel and timeout, gently first, with the process if it must be.

The loop thread decides; a signal brings the error into user code on the main thread, where it is
raised only inside :meth:`Cancellation.allowed`. A task that does not stop ends with its worker. A call
of an actor does not, for its state is also that of other callers: it is told (a coroutine by
``CancelledError``, a sync actor's method by the error itself, a thread by ``is_cancelled()``), and if it
still runs after a while, its caller is told that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Protocol

from stoker.exceptions import StokerError, TaskCancelledError, TaskTimeoutError
from stoker.runtime.serialization.exceptions import failed_with
from stoker_wire.messages.data import Cancel, Failed, Retire

if TYPE_CHECKING:
    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker.runtime.worker.call import CallTable, ReceivedCall
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.cluster import ActorSpec

_AGAIN_S = 0.05
_STUBBORN_S = 3.0
"""A task that goes on for so long after it was told to stop takes its worker with it."""
_ACTOR_GRACE_S = 1.0
"""A call of an actor that goes on for so long after it was told to stop is given up by its caller."""


class _Actor(Protocol):
    """The actor that this worker is, if it is one."""

    spec: ActorSpec

    def interrupt(self, work: ReceivedCall) -> bool:
        """Stop a running call; False for a sync actor, where the main thread must be told."""


class _Worker(Protocol):
    """The worker whose calls are stopped."""

    @property
    def actor(self) -> _Actor | None: ...
    def answer(self, work: ReceivedCall, failed: Failed) -> None: ...
    def give_back(self, channel: Channel, task_ids: list[str]) -> None: ...


class Cancellation:
    """How calls at this worker are stopped."""

    def __init__(
        self,
        io: IoThread,
        events: TaskEvents,
        pending: PendingCalls,
        calls: CallTable,
        worker: _Worker,
    ) -> None:
        self._io = io
        self._events = events
        self._pending = pending
        self._calls = calls
        self._worker = worker
        self._main = threading.main_thread().ident
        self._inside: str | None = None

    def listen(self) -> None:
        """Take the signal by which a call is interrupted (main thread)."""
        signal.signal(signal.SIGUSR1, self._on_signal)

    # -- the main thread -------------------------------------------------------------------------

    def allowed(self, work: ReceivedCall) -> _Allowed:
        """User code runs inside: a cancel may raise in it (main thread only)."""
        return _Allowed(self, work if threading.get_ident() == self._main else None)

    def _on_signal(self, signum: int, frame: object) -> None:
        work = self._calls.running.get(self._inside or "")
        if work is not None and work.interrupt is not None:
            self._inside = None
            raise work.interrupt

    # -- the loop thread -------------------------------------------------------------------------

    def on_cancel(self, message: Cancel) -> None:
        task_id = message.task_id
        work = self._calls.queued.get(task_id) or self._calls.running.get(task_id)
        if work is None:
            return
        error = TaskCancelledError(f"task {work.template.name} ({task_id}) was cancelled")
        if message.recursive:
            self._pending.cancel_children(task_id, force=message.force)
        self._interrupt(work, error, grace_s=0.0 if message.force else None)

    def on_timeout(self, work: ReceivedCall) -> None:
        task_id = work.call.task_id
        if task_id in self._calls.queued and not work.started_at_s:
            # The clock of `timeout` starts with the task, not with its arrival.
            self._io.loop.call_later(work.template.timeout_s, self.on_timeout, work)
        elif task_id in self._calls.running:
            left_s = work.started_at_s + work.template.timeout_s - time.time()
            if left_s > 0.001:
                self._io.loop.call_later(left_s, self.on_timeout, work)
                return
            error = TaskTimeoutError(
                f"task {work.template.name} ({task_id}) ran longer than its timeout of "
                f"{work.template.timeout_s:g} s"
            )
            self._interrupt(work, error, grace_s=_STUBBORN_S)

    def _interrupt(self, work: ReceivedCall, error: StokerError, *, grace_s: float | None) -> None:
        """Stop a call: drop it, or raise in it; after ``grace_s`` end this process instead."""
        task_id = work.call.task_id
        if self._calls.queued.pop(task_id, None) is not None:
            self._worker.answer(work, failed_with(error))
            return
        work.interrupt = error
        with self._calls.credit_changed:  # a generator may wait there
            self._calls.credit_changed.notify_all()
        actor = self._worker.actor
        if actor is not None:
            if not actor.interrupt(work):
                self._signal(work)
            self._io.loop.call_later(_ACTOR_GRACE_S, self._give_up, work)
            return
        if grace_s == 0.0:
            self._die_with(work)
            return
        self._signal(work)
        if grace_s is not None:
            self._io.loop.call_later(grace_s, self._die_if_running, work)

    def _give_up(self, work: ReceivedCall) -> None:
        """A call of an actor does not stop: its caller must not wait for it."""
        actor, error = self._worker.actor, work.interrupt
        if actor is None or error is None or self._calls.running.get(work.call.task_id) is not work:
            return
        text = (
            f"{error.message}, but its code does not stop\n"
            f"it still runs in actor {actor.spec.class_name} ({actor.spec.actor_id}): let it look at "
            "stoker.get_runtime_context().is_cancelled(), or end the actor with stoker.kill()"
        )
        self._worker.answer(work, failed_with(type(error)(text)))
        work.answered = True

    def _signal(self, work: ReceivedCall) -> None:
        """Wake the main thread until it has raised: a signal that comes just before it blocks in C
        is seen only after it has stopped blocking."""
        if self._main is not None and self._inside == work.call.task_id:
            signal.pthread_kill(self._main, signal.SIGUSR1)
            self._io.loop.call_later(_AGAIN_S, self._signal, work)

    def _die_if_running(self, work: ReceivedCall) -> None:
        if work.call.task_id in self._calls.running:
            self._die_with(work)

    def _die_with(self, work: ReceivedCall) -> None:
        """User code does not stop: tell the caller, then end the process under it."""
        assert work.interrupt is not None
        self._worker.answer(work, failed_with(work.interrupt))
        back: dict[Channel, list[str]] = {}
        for other in list(self._calls.queued.values()):
            back.setdefault(other.channel, []).append(other.call.task_id)
        for channel, task_ids in back.items():
            self._worker.give_back(channel, task_ids)
        work.channel.post(Retire())

        async def leave() -> None:
            self._events.write()
            await asyncio.wait_for(work.channel.close(), 1.0)
            os._exit(0)

        self._io.background.spawn(leave(), name="leave")


class _Allowed:
    """The span of user code. A class: contextlib's sets attributes of exceptions, and some users'
    are frozen."""

    __slots__ = ("_cancellation", "_work")

    def __init__(self, cancellation: Cancellation, work: ReceivedCall | None) -> None:
        self._cancellation = cancellation
        self._work = work

    def __enter__(self) -> None:
        work = self._work
        if work is None:
            return
        self._cancellation._inside = work.call.task_id
        if work.interrupt is not None:
            self._cancellation._inside = None
            raise work.interrupt

    def __exit__(self, *raised: object) -> None:
        if self._work is not None:
            self._cancellation._inside = None
