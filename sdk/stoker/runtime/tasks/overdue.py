"""Calls that should have been stopped and were not: their owner sees to it that they end all the same.

A worker enforces ``timeout`` and ``cancel`` by itself, as it alone knows when a call has begun. One whose
interpreter is held by C code, or whose process is stopped, can not. So the owner asks it for a sign of life
when a call is overdue, and where none comes, has its ``stop`` function end it by other means. Used by
:mod:`stoker.runtime.tasks.submitter` and :mod:`stoker.runtime.actors.calls`, on the loop thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.runtime.tasks.task_spec import PendingTask, Phase
from stoker_wire.messages.data import Ping

if TYPE_CHECKING:
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.data.channel import Channel

TIMEOUT_GRACE_S = 3.5
"""How long after its timeout a call is overdue: a worker that answers has killed it by then."""
CANCEL_GRACE_S = 1.0
"""The same after a cancellation."""
_ANSWER_S = 1.5
"""How long a worker may take for a sign of life."""
_AGAIN_S = 5.0
"""How long a worker that gives one is trusted to stop the call."""

Stop = Callable[[PendingTask], None]
Left = Callable[[PendingTask, float], float]
"""Returns how long a call cannot be overdue yet by a limit: it waits at its worker behind others."""


class OverdueCalls:
    """Watches over calls that have a limit, and the signs of life that are awaited."""

    def __init__(self, io: IoThread) -> None:
        self._io = io
        self._numbers = itertools.count(1)
        self._awaited: dict[int, Channel] = {}
        """The signs of life that have not come, by number."""

    def watch(self, task: PendingTask, limit_s: float, left: Left, stop: Stop) -> None:
        """Have ``stop(task)`` called if this attempt runs for ``limit_s`` at a worker that is silent."""
        self._io.loop.call_later(limit_s, self._check, task, task.attempt, limit_s, left, stop)

    def _check(
        self, task: PendingTask, attempt: int, limit_s: float, left: Left, stop: Stop
    ) -> None:
        channel = task.channel
        if task.phase is not Phase.SENT or task.attempt != attempt or channel is None:
            return
        left_s = left(task, limit_s)
        if left_s > 0:
            self._io.loop.call_later(left_s, self._check, task, attempt, limit_s, left, stop)
            return
        number = next(self._numbers)
        self._awaited[number] = channel
        channel.post(Ping(number))
        self._io.loop.call_later(
            _ANSWER_S, self._decide, number, task, attempt, limit_s, left, stop
        )

    def _decide(
        self,
        number: int,
        task: PendingTask,
        attempt: int,
        limit_s: float,
        left: Left,
        stop: Stop,
    ) -> None:
        if number in self._awaited:
            self._awaited[number].receive_now()  # this process may have been the silent one
        silent = self._awaited.pop(number, None) is not None
        if task.phase is not Phase.SENT or task.attempt != attempt:
            return
        if silent:
            stop(task)
        else:
            self._io.loop.call_later(_AGAIN_S, self._check, task, attempt, limit_s, left, stop)

    def on_pong(self, number: int) -> None:
        """Note a sign of life."""
        self._awaited.pop(number, None)
