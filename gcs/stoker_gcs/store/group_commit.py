"""The one writer of a process: callers that write in the same tick share one transaction.

``apply`` returns when its change is durable, and raises its WriteConflict when a row was not as the
change expected. Task history has a queue of its own, so that a flood of it never delays a job or an
actor by more than one batch. Both queues are bounded: a full one makes its callers wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from stoker_gcs.store.changes import WriteConflict
from stoker_wire.errors import UnavailableError
from stoker_wire.process.metrics import Distribution

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from stoker_gcs.store.changes import Change
    from stoker_gcs.store.protocol import Store
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event
    from stoker_wire.process.pauses import Pauses

T = TypeVar("T")
R = TypeVar("R")
MAX_CHANGES = 512
MAX_TASK_BATCHES = 64
QUEUE_SIZE = 4096


class BatchQueue(Generic[T, R]):
    """A queue whose callers put one item each and share a write, which returns one result per item."""

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[Sequence[R]]],
        *,
        max_batch: int,
        pauses: Pauses | None = None,
    ) -> None:
        self._write = write
        self._pauses = pauses
        self._max_batch = max_batch
        self._queue: asyncio.Queue[tuple[T, asyncio.Future[R], float]] = asyncio.Queue(QUEUE_SIZE)
        self._closed = False
        self.batches = 0
        self.items = 0
        self.failures = 0
        self.seconds = Distribution()
        """What each batch took that was written."""

    @property
    def waiting(self) -> int:
        """The number of items that wait for their batch."""
        return self._queue.qsize()

    async def put(self, item: T) -> R:
        """Return the item's result once its batch is written."""
        if self._closed:
            raise UnavailableError("the gcs is stopping and takes no more writes")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        await self._queue.put((item, done, loop.time()))
        return await done

    async def close(self) -> None:
        """Refuse new items, and return when all others are written."""
        self._closed = True
        await self._queue.join()

    async def run(self) -> None:
        """Write batches until cancelled (after :meth:`close`, when nothing is left)."""
        try:
            while True:
                batch = [await self._queue.get()]
                while len(batch) < self._max_batch and not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                try:
                    await self._commit(
                        [(item, done) for item, done, at_s in batch if self._is_due(done, at_s)]
                    )
                finally:
                    for _ in batch:
                        self._queue.task_done()
        finally:
            self._closed = True
            while not self._queue.empty():
                _, done, _ = self._queue.get_nowait()
                if not done.done():
                    done.set_exception(UnavailableError("the gcs stopped before this write"))

    def _is_due(self, done: asyncio.Future[R], at_s: float) -> bool:
        """Return whether to write an item; what waited while this process was stopped is refused.

        Its caller has asked another replica since.
        """
        if self._pauses is None or not self._pauses.since(at_s):
            return True
        if not done.done():
            done.set_exception(UnavailableError("this gcs was stopped for a while\ntry again"))
        return False

    async def _commit(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        if not batch:
            return
        began_s = time.perf_counter()
        try:
            results = await self._write([item for item, _ in batch])
        except Exception as error:
            self.failures += 1
            for _, done in batch:
                if not done.done():
                    done.set_exception(error)
            return
        self.seconds.observe(time.perf_counter() - began_s)
        self.batches += 1
        self.items += len(batch)
        for (_, done), result in zip(batch, results, strict=True):
            if not done.done():
                done.set_result(result)


class GroupCommitWriter:
    """The queues in front of a store: one of changes, one of task history.

    ``committed`` is called with the events of each commit, in order. ``pauses`` are those of a replica.
    """

    def __init__(
        self,
        store: Store,
        committed: Callable[[Sequence[Event]], None],
        pauses: Pauses | None = None,
    ) -> None:
        self._store = store
        self._committed = committed
        self.changes: BatchQueue[Change, tuple[Event, ...] | WriteConflict] = BatchQueue(
            self._write_changes, max_batch=MAX_CHANGES, pauses=pauses
        )
        self.tasks: BatchQueue[Sequence[TaskRow], None] = BatchQueue(
            self._write_tasks, max_batch=MAX_TASK_BATCHES
        )

    async def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``, and refuse the rest."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.changes.close()
                await self.tasks.close()
        except TimeoutError:
            return

    async def apply(self, change: Change) -> tuple[Event, ...]:
        """Write the change durably and return its events; raise its WriteConflict."""
        result = await self.changes.put(change)
        if isinstance(result, WriteConflict):
            raise result
        return result

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history, durably."""
        if rows:
            await self.tasks.put(rows)

    async def _write_changes(self, batch: list[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        results = await self._store.commit(batch)
        events = [
            event for result in results if not isinstance(result, WriteConflict) for event in result
        ]
        if events:
            self._committed(events)
        return results

    async def _write_tasks(self, batch: list[Sequence[TaskRow]]) -> list[None]:
        await self._store.put_tasks([row for rows in batch for row in rows])
        return [None] * len(batch)
