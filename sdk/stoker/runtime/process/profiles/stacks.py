"""The stacks of this process as its loop thread sees them, coroutines that wait included."""

from __future__ import annotations

import asyncio
import sys
import threading
from itertools import islice
from typing import TYPE_CHECKING, Any

from stoker.runtime.worker.event_loops import run_loop
from stoker_wire.messages.node_api import (
    MAX_STACK_FRAMES,
    MAX_THREADS,
    StackFrame,
    ThreadStack,
    WorkerStacks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

_RUN = asyncio.Runner.run.__code__
_RUN_GROUP = run_loop.__code__


def worker_stacks(task_ids: Iterable[str]) -> WorkerStacks:
    """Return the stacks of all threads but the calling one, and of the tasks of their event loops."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    threads = []
    loops = []
    for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]:
        if ident != here:
            name = names.get(ident, f"thread {ident}")
            threads.append(ThreadStack(name=name, frames=frames_of(frame)))
            loops += _loops_of(frame)
    threads.sort(key=lambda thread: thread.name != threading.main_thread().name)
    coroutines = (
        ThreadStack(name=task.get_name(), frames=_frames_of_task(task))
        for loop in loops
        for task in asyncio.all_tasks(loop)
    )
    waiting = islice((one for one in coroutines if one.frames), MAX_THREADS)
    return WorkerStacks(
        threads=tuple(threads),
        coroutines=tuple(waiting),
        task_ids=tuple(task_ids),
    )


def frames_of(frame: FrameType | None) -> tuple[StackFrame, ...]:
    """Return the frames from one outwards."""
    frames: list[StackFrame] = []
    while frame is not None and len(frames) < MAX_STACK_FRAMES:
        frames.append(_frame(frame))
        frame = frame.f_back
    return tuple(frames)


def _frame(frame: FrameType) -> StackFrame:
    code = frame.f_code
    return StackFrame(function=code.co_qualname, file=code.co_filename, line=frame.f_lineno or 0)


def _loops_of(frame: FrameType | None) -> list[Any]:
    """Return the event loops that a thread runs: those of an actor, and of code by ``asyncio.run``."""
    loops = []
    while frame is not None:
        if frame.f_code is _RUN:
            loops.append(frame.f_locals["self"].get_loop())
        elif frame.f_code is _RUN_GROUP and "loop" in frame.f_locals:
            loops.append(frame.f_locals["loop"])
        frame = frame.f_back
    return loops


def _frames_of_task(task: asyncio.Task[Any]) -> tuple[StackFrame, ...]:
    """Return where a task waits, the innermost coroutine first; nothing of one that runs right now."""
    frames: list[StackFrame] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(frames) < MAX_STACK_FRAMES:
        if getattr(awaited, "cr_running", False):
            return ()
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append(_frame(frame))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return tuple(reversed(frames))
