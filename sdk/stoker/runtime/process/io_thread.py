"""The one thread of a runtime that does I/O: its event loop, its background work, and its wake-up.

All that is marked "loop thread" runs on it, or on a *guest*: a thread that takes its place for a moment
(leader and followers). Between :meth:`IoThread.enter` and :meth:`IoThread.leave` the guest *is* the loop
thread, while the loop sleeps; whichever of them runs holds the *turn*. So a thread that has nothing to do but
wait for one answer does the work itself, which saves two switches between threads, and the state that belongs
to the loop needs no locks. Other threads leave work in queues of their own and call :meth:`IoThread.wake`,
which costs one wake-up for all that is left until then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import selectors
import threading
from asyncio.events import _get_running_loop, _set_running_loop
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from stoker.runtime.process.held_signals import HeldSignals
from stoker_wire.errors import DeadlineExceededError
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    import socket
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_START_S = 20.0
_JOIN_S = 5.0
_LAST_TURNS = 8
"""Turns that the loop has left to end what was cancelled."""


class _Selector(selectors.DefaultSelector):
    """A selector that gives up the loop's turn while it waits, and no longer."""

    def __init__(self, turn: threading.Lock) -> None:
        super().__init__()
        self._turn = turn
        self._was_changed = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._was_changed = False
        self._turn.release()
        try:
            events: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        finally:
            self._turn.acquire()
        if self._was_changed:  # an event of what is registered no more would undo what is
            keys = self.get_map()
            events = [event for event in events if keys.get(event[0].fd) is event[0]]
        return events

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._was_changed = True
        key: selectors.SelectorKey = super().unregister(fileobj)
        return key


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, which says whether anything was scheduled (its callers may be guests)."""

    has_new = False
    _transports: Mapping[int, asyncio.Transport]
    """asyncio's own: the open connections."""

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self.has_new = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.has_new = True
        return super().call_at(when, callback, *args, context=context)

    def _make_socket_transport(
        self, sock: socket.socket, *args: Any, server: Any = None, **options: Any
    ) -> asyncio.Transport:
        _check_serves(sock, server)
        made: asyncio.Transport = super()._make_socket_transport(  # type: ignore[misc]
            sock, *args, server=server, **options
        )
        return made

    def _make_ssl_transport(
        self, rawsock: socket.socket, *args: Any, server: Any = None, **options: Any
    ) -> asyncio.Transport:
        _check_serves(rawsock, server)
        made: asyncio.Transport = super()._make_ssl_transport(  # type: ignore[misc]
            rawsock, *args, server=server, **options
        )
        return made


def _check_serves(accepted: socket.socket, server: Any) -> None:
    """Close a connection that a server had accepted when it was closed: asyncio would only forget it."""
    if server is not None and not server.sockets:
        accepted.close()
        raise ConnectionAbortedError("its server has been closed")


class IoThread:
    """The loop thread of this process. Thread-safe where a method does not say "loop thread"."""

    background: Background

    def __init__(self, name: str) -> None:
        self._turn = threading.Lock()
        """Held by whoever is the loop thread: the thread itself, but while it sleeps, or a guest."""
        self.loop = _Loop(_Selector(self._turn))
        self.loop.set_debug(False)  # even if Python's development mode is on: it refuses guests
        self.running = True
        """False from the moment on at which the runtime ends."""
        self._name = name
        self._guest = 0
        """The thread that has entered, by its ident."""
        self._outer_loop: asyncio.AbstractEventLoop | None = None
        self._pauses_gc = False
        self._at_turn_end: list[Callable[[], object]] = []
        self._wake_scheduled = False
        self._flushes: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; return when it takes work."""
        self._thread = threading.Thread(target=self._serve, name="stoker-io", daemon=True)
        self._thread.start()
        self.run(self._begin(), _START_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        with self._turn:
            self.loop.run_forever()

    async def _begin(self) -> None:
        self.background = Background(self._name)

    def stop(self) -> None:
        """End the thread and close its loop."""
        self.loop.call_soon_threadsafe(self._end)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if not self.loop.is_running():
            self.loop.close()

    def _end(self) -> None:
        """Cancel what others have left on the loop, as ``asyncio.run`` does, and stop it."""
        for task in asyncio.all_tasks():
            task.cancel()
        self._after_last_turns(self._abort_connections)

    def _abort_connections(self) -> None:
        """Close what nobody else does: a server accepts to the end, and knows not all when it closes."""
        for transport in list(self.loop._transports.values()):
            transport.abort()
        self._after_last_turns(self.loop.stop)

    def _after_last_turns(self, then: Callable[[], object], turns: int = _LAST_TURNS) -> None:
        """Do something some turns later: what was ended has connections to close, each in its turn."""
        if turns:
            self.loop.call_soon(self._after_last_turns, then, turns - 1)
        else:
            then()

    def is_current(self) -> bool:
        """Return whether the caller is this thread, or has taken its place: it must not block."""
        ident = threading.get_ident()
        return self._guest == ident or (self._thread is not None and self._thread.ident == ident)

    def check_may_wait(self) -> None:
        """Raise RuntimeError on the loop thread: what it would wait for is its own work."""
        if self.is_current():
            raise RuntimeError(
                "Stoker's loop thread cannot wait for a result, as it is what brings results\n"
                "this call was made in a destructor (__del__, weakref.finalize) or a callback that ran "
                "there: have a thread of your own make it, or call it before the object is dropped"
            )

    # -- guests ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Take the loop thread's place until :meth:`leave`, as soon as the loop sleeps.

        For work that is short and never waits. On the main thread of a driver inside
        :class:`~stoker.runtime.process.held_signals.HeldSignals`, as a signal's handler may raise.
        """
        self._turn.acquire()
        self._become_guest()

    def try_enter(self) -> bool:
        """Enter if the loop sleeps just now; return whether it did."""
        entered = self._turn.acquire(blocking=False)
        if entered:
            self._become_guest()
        return entered

    def _become_guest(self) -> None:
        self._guest = threading.get_ident()
        self._outer_loop = _get_running_loop()
        _set_running_loop(self.loop)
        self.loop.has_new = False
        # A destructor of user code that waits for a task would wait for this very thread.
        self._pauses_gc = gc.isenabled()
        if self._pauses_gc:
            gc.disable()

    def leave(self) -> None:
        """Give the place back; the loop thread goes on with what was scheduled meanwhile."""
        if self._at_turn_end:
            self._end_turn()
        if self._pauses_gc:
            gc.enable()
        _set_running_loop(self._outer_loop)
        self._outer_loop = None
        self._guest = 0
        has_new = self.loop.has_new
        self._turn.release()
        if has_new and self.running:
            self.loop.call_soon_threadsafe(_nothing)

    def at_turn_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when this turn of the loop ends, or that of a guest (loop thread)."""
        if self._guest:
            self._at_turn_end.append(callback)
        else:
            self.loop.call_soon(callback)

    def _end_turn(self) -> None:
        while self._at_turn_end:
            callbacks, self._at_turn_end = self._at_turn_end, []
            for callback in callbacks:
                callback()

    # -- other threads -----------------------------------------------------------------------------

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` on the loop thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop thread and wait for it. RuntimeError on the loop thread."""
        if self.is_current():
            coroutine.close()
        self.check_may_wait()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            name = getattr(coroutine, "__qualname__", "a call")
            raise DeadlineExceededError(f"{name} passed its deadline of {timeout_s:g} s") from None
        finally:
            del future  # its error has this frame, and so would keep the refs of callers until a gc

    def on_wake(self, *flushes: Callable[[], object]) -> None:
        """Call these on the loop thread, in this order, after each :meth:`wake`."""
        self._flushes += flushes

    def wake(self) -> None:
        """Wake the loop thread to take what other threads left (one wake-up per batch)."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            if threading.current_thread() is self._thread:  # awake: no byte need be sent
                self.loop.call_soon(self.flush)
            else:
                self.loop.call_soon_threadsafe(self.flush)

    def flush_now(self) -> None:
        """Do on the calling thread what :meth:`wake` has the loop thread do, if the loop sleeps."""
        if self._wake_scheduled:
            return  # it is under way
        with HeldSignals():
            if self.visit(self.flush):
                return
        self.wake()

    def visit(self, work: Callable[[], object]) -> bool:
        """Enter, do ``work`` and leave, if the loop sleeps just now; return whether it did.

        Errors go where those of the loop's own callbacks go.
        """
        if not self.try_enter():
            return False
        try:
            work()
        except Exception as error:
            self.on_error(error)
        finally:
            self.leave()
        return True

    def on_error(self, error: Exception) -> None:
        """Report an error of work on the loop thread, which must go on (loop thread)."""
        self.loop.call_exception_handler(
            {"message": "an error on the loop thread", "exception": error}
        )

    def flush(self) -> None:
        """Take what other threads left (loop thread)."""
        self._wake_scheduled = False
        for flush in self._flushes:
            flush()
            if self._at_turn_end:
                self._end_turn()


def _nothing() -> None:
    """Do nothing: to schedule it wakes the loop."""
