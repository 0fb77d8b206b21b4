"""An event loop in virtual time that knows of processes: each can be frozen and killed at any instant.

All processes of a world share the loop. A context variable says whose callback runs; those of a frozen
process are held back, those of a killed one never run. Nothing here waits: when nothing can run, the clock
goes to the next timer. Equal times run in the order in which they were asked for, whatever the hash seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import random
import time
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

EPOCH_S = 1_700_000_000.0
"""What ``time.time`` says when the loop's clock is 0."""
_COMPACT = 512


class Process:
    """An operating-system process of the world, on a host."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.frozen = False
        self.dead = False
        self.held: list[asyncio.Handle] = []
        self.disturbed_s = -1.0
        """When others last could not reach it for a while."""
        self.at_death: list[Callable[[], None]] = []
        """What its kernel does when it is gone: close its connections."""
        self.context = copy_context()
        self.context.run(CURRENT.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this process."""
        assert not self.dead, f"{self.name} is dead"
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def disturb(self) -> None:
        """Note that what it sends, or is sent, may come too late."""
        self.disturbed_s = time.monotonic()

    def freeze(self) -> None:
        """Stop it, as SIGSTOP does."""
        self.frozen = True
        self.disturb()

    def thaw(self) -> None:
        """Let it go on, with all that has become due meanwhile."""
        self.frozen = False
        self.disturb()
        held, self.held = self.held, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.resume(held)

    def kill(self) -> None:
        """End it, as SIGKILL does: nothing of it runs any more, and its kernel closes its connections."""
        if self.dead:
            return
        self.dead, self.frozen, self.held = True, False, []
        self.disturb()
        for close in self.at_death:
            close()
        self.at_death.clear()


CURRENT: ContextVar[Process | None] = ContextVar("CURRENT", default=None)


class _Numbers:
    """The numbers of what one world makes; each world begins anew."""

    count = itertools.count(1)


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on its address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(_Numbers.count)
        super().__init__(*args, **kwargs)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number


class _Event(asyncio.Event):
    """An event whose place in a set does not depend on its address."""

    def __init__(self) -> None:
        self.number = next(_Numbers.count)
        super().__init__()

    def __hash__(self) -> int:
        return self.number


class _Handle(asyncio.Handle):
    """A callback, made and cancelled in fewer steps than asyncio's: a run has many."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class _Timer(asyncio.TimerHandle):
    """A callback at a time, likewise."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None
            if self._scheduled:
                self._loop._timer_handle_cancelled(self)


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. ``at_turn_end``, where it is set, is called once, at the end of this turn."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.at_turn_end: Callable[[], None] | None = None
        self.set_task_factory(_new_task)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._next_number = itertools.count()
        self._cancelled = 0

    def time(self) -> float:
        return self.now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._next_number), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        when = self.now_s + delay if delay > 0.0 else self.now_s
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._next_number), timer))
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Run what was held back."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > _COMPACT and self._cancelled * 2 > len(self._timers):
            self._timers = [one for one in self._timers if not one[2]._cancelled]  # type: ignore[attr-defined]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
                heapq.heappop(timers)
                self._cancelled -= 1
            assert timers, "nothing will ever happen again"
            self.now_s = max(self.now_s, timers[0][0])
        now_s = self.now_s
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:  # type: ignore[attr-defined]
                self._cancelled -= 1
            else:
                ready.append(timer)
        current = CURRENT
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(current)
            if process is not None and (process.frozen or process.dead):
                if process.frozen:
                    process.held.append(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                context = {"message": f"{handle} crashed", "exception": error, "handle": handle}
                self.call_exception_handler(context)
        if self.at_turn_end is not None:
            at_turn_end, self.at_turn_end = self.at_turn_end, None
            at_turn_end()

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """There is none."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Threads would race with virtual time."""
        raise AssertionError(f"{func} would run in a thread")


def _new_task(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> Any:
    return _Task(work, loop=loop, **more)


@contextlib.contextmanager
def virtual(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Have every clock, random number and id come from the loop and the seed, in this process."""
    source = random.Random(f"ids {seed}")
    before = random.getstate()
    saved = (time.time, time.monotonic, os.urandom, asyncio.Event)
    random.seed(f"product {seed}")
    _Numbers.count = itertools.count(1)
    time.time = lambda: EPOCH_S + loop.now_s
    time.monotonic = lambda: loop.now_s
    os.urandom = lambda size: source.getrandbits(8 * size).to_bytes(size, "big")
    asyncio.Event = _Event  # type: ignore[misc]
    try:
        yield
    finally:
        time.time, time.monotonic, os.urandom, asyncio.Event = saved  # type: ignore[misc]
        random.setstate(before)
