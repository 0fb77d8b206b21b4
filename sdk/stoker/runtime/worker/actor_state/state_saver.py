"""The saves of an actor's state: one at a time, and each for all calls that ended before it began.

A call is answered once a save that began after its end has ended, so a state that is stored always has what
was answered, and calls that end while a state is stored share the next save. Owned by
:class:`~stoker.runtime.worker.actor.ActorHost`. Threads save by themselves; for an async actor one coroutine
does, on the event loop of the default group, with a thread of its own that stores.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stoker_wire.errors import DeadlineExceededError, FencedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime.worker.actor_state.saved_state import SavedState

_PAUSE_S = (30.0, 600.0)
"""The shortest pause after a state that could not be stored, doubled each time, and the longest."""


class StateSaver:
    """The saves of this worker's actor. ``take`` calls its hook."""

    def __init__(
        self, saved: SavedState, take: Callable[[], Any], interval_s: float | None
    ) -> None:
        self.after_each_call = interval_s == 0.0
        """Whether no call is answered before a save: in a move that is so whatever the interval."""
        self.is_fenced = False
        """Whether another incarnation has taken over: what runs here is answered no more."""
        self._saved = saved
        self._take = take
        self._interval_s = interval_s
        self._pause_s = 0.0
        self._next_s = time.monotonic() + (interval_s or 0.0)
        self._begun = 0
        """How many saves have begun."""
        self._lock = threading.Lock()
        """Held by threads while a state is taken and stored, and by others for ``_waiting``."""
        self._waiting: concurrent.futures.Future[None] | None = None
        """Done once the save has ended that is the next to begin."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requested = asyncio.Event()

    @property
    def is_due(self) -> bool:
        """Whether a call that ends now is answered after a save."""
        if self.after_each_call or self.is_fenced:
            return True
        return self._interval_s is not None and time.monotonic() >= self._next_s

    # -- threads -----------------------------------------------------------------------------------

    def save(self) -> bool:
        """Return once a save that began after this has ended; False if the call is not to be answered."""
        begun = self._begun
        with self._lock:
            if self._begun == begun and not self.is_fenced:
                self._begin()
                try:
                    state = self._take()
                    if inspect.iscoroutine(state):
                        state = asyncio.run(state)
                    self._store(state)
                except (Exception, SystemExit) as error:
                    self._failed(error)
        return not self.is_fenced

    # -- any thread --------------------------------------------------------------------------------

    def request(self) -> concurrent.futures.Future[None]:
        """Return the end of a save that begins after this, of an async actor."""
        with self._lock:
            if self._waiting is None:
                self._waiting = concurrent.futures.Future()
                self._waiting.set_running_or_notify_cancel()  # no one of those that wait cancels it
                if self._loop is not None:
                    with contextlib.suppress(RuntimeError):  # it is closed
                        self._loop.call_soon_threadsafe(self._requested.set)
            return self._waiting

    # -- the event loop of the default group -------------------------------------------------------

    async def serve(self) -> None:
        """Save whenever that is requested, until cancelled."""
        pool = ThreadPoolExecutor(1, "stoker-save")
        try:
            while True:
                with self._lock:
                    self._loop = asyncio.get_running_loop()
                    waiting, self._waiting = self._waiting, None
                if waiting is None:
                    await self._requested.wait()
                    self._requested.clear()
                    continue
                try:
                    if not self.is_fenced:
                        await self._save(pool)
                finally:
                    waiting.set_result(None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _save(self, pool: ThreadPoolExecutor) -> None:
        self._begin()
        try:
            state = self._take()
            if inspect.isawaitable(state):
                state = await state
            await asyncio.get_running_loop().run_in_executor(pool, self._store, state)
        except (Exception, SystemExit) as error:
            self._failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failed(error)  # the hook awaited what was cancelled

    # -- either ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun += 1
        self._next_s = time.monotonic() + (self._interval_s or 0.0)

    def _store(self, state: Any) -> None:
        """Store a state; where that waits for the gcs in vain, the next try comes ever later."""
        try:
            self._saved.store(state, insists=self._interval_s == 0.0)
        except (UnavailableError, DeadlineExceededError):
            shortest_s = max(self._interval_s or 0.0, _PAUSE_S[0])
            self._pause_s = min(max(2 * self._pause_s, shortest_s), max(_PAUSE_S[1], shortest_s))
            self._next_s = time.monotonic() + self._pause_s
            raise
        self._pause_s = 0.0

    def _failed(self, error: BaseException) -> None:
        """Go on with the state before."""
        if isinstance(error, FencedError):
            self.is_fenced = True
        else:
            self._saved.failed(error)
