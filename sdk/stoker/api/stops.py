"""The notice of a stop, and what to do then: ``stoker.preemption_notice()``, ``stoker.on_stop()``."""

from __future__ import annotations

from typing import Any, TypeVar

from stoker.exceptions import WrongTypeError
from stoker.runtime import current
from stoker.runtime.process.stops import STOPS, Callback, PreemptionNotice

C = TypeVar("C", bound=Callback)
_REGISTER_S = 10.0


def preemption_notice() -> PreemptionNotice:
    """Return the notice that this worker is to end, which may not have been given yet.

    ``notice.is_set()`` and ``notice.wait(timeout)`` are for code that looks between its steps, ``await
    notice`` for coroutines. ``notice.reason`` says what it is for, ``notice.deadline_s`` when SIGTERM comes.
    """
    return STOPS.notice


def on_stop(callback: C) -> C:
    """Have ``callback(notice)`` run when this worker is to end: to save a checkpoint, say.

    It holds for the task that registers it, in an actor for the actor's life. It runs on a thread of its
    own, beside the task, so what it saves must be whole at any time; a coroutine function runs on the event
    loop in which it was registered. When all have run, SIGTERM follows at once, else at the notice's
    deadline. In a driver the notice is SIGTERM: callbacks run on the main thread, then it exits. Returns
    ``callback``, so that it can be a decorator.
    """
    given: Any = callback
    if not callable(given):
        raise WrongTypeError(
            f"on_stop() takes a function of the notice, not {type(given).__name__}",
            field="callback",
        )
    is_first = not STOPS.registered
    STOPS.add(callback)
    if is_first and STOPS.is_worker:
        runtime = current.runtime()
        runtime.io.run(runtime.clients.register_stop_callbacks(), _REGISTER_S)
    return callback
