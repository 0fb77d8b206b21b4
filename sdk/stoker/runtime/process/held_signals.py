"""Signals held back while the main thread does work that must not be torn.

Python runs signal handlers on the main thread between any two bytecodes, and they may raise: Ctrl-C does.
The runtime's state belongs to its loop thread, where that never happens. A user's main thread that takes the
loop's place for a moment holds the handlers back for as long.
"""

from __future__ import annotations

import signal
import threading

# signal's own functions make enums of what they return, which takes ten times as long.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

_SIGNALS = tuple(
    int(s) for s in signal.valid_signals() if s < 32 and s not in (signal.SIGKILL, signal.SIGSTOP)
)

T = TypeVar("T")
_Handlers = tuple[tuple[int, Callable[[int, Any], Any]], ...]


class _Last:
    """All handlers at the last look, and those of Python: nearly always SIGINT's alone."""

    look: tuple[tuple[Any, ...], _Handlers] = (), ()


def _python_handlers() -> _Handlers:
    handlers = tuple(map(_get_handler, _SIGNALS))
    known, python = _Last.look
    if handlers != known:
        pairs = zip(_SIGNALS, handlers, strict=True)
        python = tuple((number, handler) for number, handler in pairs if callable(handler))
        _Last.look = handlers, python
    return python


class _HandlerRan(BaseException):
    """Ends a wait: what it waits for may have come to the handler."""


class _Phase(Enum):
    HOLDS = 0
    PASSES = 1
    ENDED = 2


class HeldSignals:
    """A span in which the handlers of signals wait, but inside of :meth:`passing`.

    On other threads than the main one it does nothing: handlers do not run there. A handler that sets
    another one finds that as it set it.
    """

    __slots__ = ("_handlers", "_held", "_phase")

    def __init__(self) -> None:
        self._handlers: _Handlers = ()
        self._held: list[tuple[int, Any]] = []
        self._phase = _Phase.HOLDS

    def __enter__(self) -> HeldSignals:
        if threading.get_ident() == threading.main_thread().ident:
            self._handlers = _python_handlers()
            for number, _ in self._handlers:
                _set_handler(number, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._handlers:
            if _get_handler(number) == self._on_signal:
                _set_handler(number, handler)
        self._phase = _Phase.ENDED
        self._deliver()

    def passing(self, wait: Callable[[float | None], T], timeout: float | None) -> T | None:
        """Return ``wait(timeout)``, or None as soon as a handler has run; those that waited run first."""
        try:
            self._phase = _Phase.PASSES
            if self._held:
                self._deliver()
                return None
            return wait(timeout)
        except _HandlerRan:
            return None
        finally:
            self._phase = _Phase.HOLDS

    def _on_signal(self, number: int, frame: Any) -> None:
        self._held.append((number, frame))
        if self._phase is _Phase.PASSES:
            self._phase = _Phase.HOLDS  # one that raises ends the wait; others are held again
            self._deliver()
            raise _HandlerRan
        if self._phase is _Phase.ENDED:  # set again by somebody who found it here
            self._deliver()

    def _deliver(self) -> None:
        while self._held:
            number, frame = self._held.pop(0)
            dict(self._handlers)[number](number, frame)
