"""The one place that makes asyncio tasks: they have names, a crash is seen, and closing awaits them.

Used by every component for work that outlives the call that starts it (loops, watches, reports).
Work that ends with its caller belongs in an ``asyncio.TaskGroup`` instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


def first_cause(error: BaseException) -> BaseException:
    """Return the first error within an exception group, however deep, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class GeneratorTasks(asyncio.TaskGroup):
    """A task group around the ``yield`` of an asynchronous generator, whose close is not an error."""

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if isinstance(error, GeneratorExit) and group.split(GeneratorExit)[1] is None:
                raise error from None
            raise


class Background:
    """An owner of named tasks; ``on_crash`` (task name, error) is called when one fails.

    ``async with Background("nodelet") as background:`` closes it at the end.
    """

    def __init__(
        self, name: str, *, on_crash: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self._name = name
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closings: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[Any, Any, T], *, name: str, report: bool = True
    ) -> asyncio.Task[T]:
        """Start ``work`` as a task; a crash is logged, unless the caller awaits it (no ``report``)."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{self._name} is closed and cannot start {name}")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended if report else self._tasks.discard)
        return task

    def close_later(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Start closing something in the background; :meth:`close` awaits it, uncancelled."""
        task = self.spawn(work, name=f"close-{name}")
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and wait for their end; tasks that ignore it are logged by name."""
        self._closed = True
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        for task in tasks - self._closings:
            task.cancel(f"{self._name} closes")
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
            for task in pending:
                _log.error(
                    "task %s did not end %.1f s after its cancel", task.get_name(), timeout_s
                )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        _log.error("task %s crashed: %s", task.get_name(), error, exc_info=error)
        if self._on_crash is not None:
            self._on_crash(task.get_name(), error)
