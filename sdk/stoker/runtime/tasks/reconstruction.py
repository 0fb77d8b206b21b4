"""Reconstruction: tasks that had ended are executed again, because results of theirs were lost.

A task that needs lost or freed results of other tasks has those executed again first, and so on. It keeps
its id, and its execution is its next attempt; results of it that are still there stay as they are.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ObjectLostError, StokerError
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.tasks.streams import AHEAD, Stream
from stoker.runtime.tasks.task_spec import PendingTask
from stoker_wire.ids import return_id, task_of
from stoker_wire.messages.data import Credit, Failed, Item, Stored
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.lineage import Dependency, Lineage, Record
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.data import Location


_POLL_S = 0.05


class Reconstruction:
    """The tasks that are being executed again (loop thread)."""

    def __init__(
        self,
        io: IoThread,
        objects: ObjectStore,
        pending: PendingCalls,
        lineage: Lineage,
        events: TaskEvents,
        submit: Callable[[PendingTask], None],
    ) -> None:
        self._io = io
        self._objects = objects
        self._pending = pending
        self._lineage = lineage
        self._events = events
        self._submit = submit
        self._running: dict[str, asyncio.Task[Failed | None]] = {}

    async def make_again(self, entry: Entry, why: str) -> Location:
        """Execute the task of a lost object again; return the object's new location.

        Raises ObjectLostError if that cannot be.
        """
        task_id, lost = task_of(entry.object_id), entry.location
        while entry.location is lost:
            if not self._yields_again(task_id, entry.object_id):
                break
            await asyncio.sleep(_POLL_S)
        if isinstance(entry.location, Stored) and entry.location is not lost:
            return entry.location
        record = self._lineage.records.get(task_id)
        if record is None:
            raise ObjectLostError(self._why_not(entry.object_id))
        failed = await asyncio.shield(self._execute(record, why))
        again = f"{record.spec.name} ({task_id}) was executed again to make it"
        if failed is not None:
            raise ObjectLostError(f"{again}, and failed\n{failed.message}")
        if entry.location is lost or entry.location is None:
            raise ObjectLostError(f"{again}, and did not make it")
        return entry.location

    def _yields_again(self, task_id: str, object_id: str) -> bool:
        """Return whether a generator that has not ended will yield a lost item once more.

        It does in each attempt after the one that made it, and its worker may have died with the item.
        """
        task = self._pending.by_id.get(task_id)
        if task is None or not isinstance(task.stream, Stream):
            return False
        channel = task.channel
        if channel is None or channel.closed:
            return True
        if self._objects.recovery.is_dead(channel.peer.node_id):
            return True
        index = object_id.rpartition(".")[2]
        return index.isdigit() and not task.stream.is_past(task.attempt, int(index))

    def _why_not(self, object_id: str) -> str:
        task_id = task_of(object_id)
        if not task_id:
            return "it was put: no task can make it again"
        if task_id in self._lineage.evicted:
            return (
                f"how {task_id} made it was forgotten: what is kept for that exceeded "
                f"{self._lineage.max_nbytes} bytes\nraise STOKER_LINEAGE_MAX_BYTES"
            )
        return (
            f"{task_id} cannot be executed again to make it: it is a call of an actor, or has "
            "max_retries=0"
        )

    def _execute(self, record: Record, why: str) -> asyncio.Task[Failed | None]:
        """Begin to execute a task again, or join its execution; its result is its failure."""
        running = self._running.get(record.task_id)
        if running is None:
            work = self._run(record, why)
            running = self._io.background.spawn(work, name="reconstruction", report=False)
            self._running[record.task_id] = running
            running.add_done_callback(lambda _: self._running.pop(record.task_id, None))
        return running

    async def _run(self, record: Record, why: str) -> Failed | None:
        name = f"{record.spec.name} ({record.task_id})"
        if record.task_id in self._pending.by_id:
            raise ObjectLostError(
                f"{name} still yields, and goes on behind it: it is executed again only once it has ended"
            )
        if not record.left:
            raise ObjectLostError(
                f"{name} was executed again {record.executions} times, which are its max_retries"
            )
        record.left -= record.left > 0
        record.executions += 1
        record.running = True
        self._lineage.hold(record.task_id)  # its arguments are needed until it has ended
        try:
            deps = [self._ref(dep, why) for dep in record.deps]
            nested = [self._ref(dep, why) for dep in record.nested]
            await self._recover(deps)
            task = PendingTask(
                record.task_id, record.spec, record.args, deps, nested, record.parent_task_id
            )
            task.attempt = record.attempt + 1
            if record.spec.template.streaming:
                task.stream = _Items(task.task_id, partial(self._take, record))
            ended: asyncio.Future[Sequence[Location]] = self._io.loop.create_future()
            self._pending.add_again(task, ended.set_result)
            self._report(task, record, why)
            for entry in self._entries_of(record):
                entry.task = task
            self._submit(task)
            locations = await ended
            record.attempt = task.attempt
            failed = locations[0] if locations and isinstance(locations[0], Failed) else None
            if not record.spec.template.streaming:
                for index in range(record.spec.template.num_returns):
                    self._take(record, index, locations[index % len(locations)])
            return failed
        finally:
            record.running = False
            for args in self._lineage.release(record.task_id):
                self._objects.values.free(args)

    def _ref(self, dep: Dependency, why: str) -> ObjectRef[Any]:
        """Return a ref to an object that a task needs; begin to make it again if it was freed."""
        objects = self._objects
        if dep.owner is not None:
            return objects.import_ref(dep.object_id, dep.owner)
        entry = objects.table.get(dep.object_id)
        if entry is not None:
            entry.refs += 1
            return ObjectRef(entry)
        record = self._lineage.records.get(dep.task_id)
        if dep.inline is None and record is None:
            what = self._why_not(dep.object_id)
            raise ObjectLostError(f"its argument {dep.object_id} was freed\n{what}")
        ref = objects.new_ref(dep.object_id)
        if dep.inline is not None:
            ref._entry.location = dep.inline
        elif record is not None:
            self._execute(record, why).add_done_callback(lambda done: self._fail(ref._entry, done))
        return ref

    def _fail(self, entry: Entry, done: asyncio.Task[Failed | None]) -> None:
        """Settle an argument whose task could not be executed again."""
        error = None if done.cancelled() else done.exception()
        if isinstance(error, StokerError) and entry.location is None:
            self._objects.settle(entry, encode_error(error))

    async def _recover(self, deps: Iterable[ObjectRef[Any]]) -> None:
        """Wait until arguments that are known to be lost are recovered."""
        recovery = self._objects.recovery
        for entry in [ref._entry for ref in deps]:
            location = entry.location
            if isinstance(location, Stored) and recovery.is_lost(entry):
                await recovery.recover(entry, location)

    def _entries_of(self, record: Record) -> list[Entry]:
        table = self._objects.table
        ids = [return_id(record.task_id, i) for i in range(record.spec.template.num_returns)]
        return [entry for i in ids if (entry := table.get(i)) is not None]

    def _take(self, record: Record, index: int, location: Location) -> None:
        """Give a new result to those who wait for it, or free it: where the old one is there, that stays."""
        objects = self._objects
        object_id = return_id(record.task_id, index)
        entry = objects.table.get(object_id)
        old = entry.location if entry is not None else None
        if entry is None:
            objects.values.free(location, object_id)
        elif old is None:
            if isinstance(location, Stored):
                self._lineage.hold(record.task_id)
            objects.settle(entry, location)
        elif isinstance(old, Stored) and objects.recovery.is_lost(entry):
            if not isinstance(location, Failed):  # `make_again` tells of a failure
                objects.relocate(entry, location)
        elif isinstance(location, Stored) and (
            not isinstance(old, Stored) or old.node_id != location.node_id
        ):
            objects.values.free(location, object_id)
        if entry is not None:
            entry.task = None

    def _report(self, task: PendingTask, record: Record, why: str) -> None:
        """Add the execution to the task history, with its reason."""
        if record.spec.template.history:
            again = self._pending.status.record(
                task,
                TaskState.QUEUED,
                reconstructs=why.splitlines()[0],
                reconstructions=record.executions,
                lineage_depth=record.depth,
            )
            self._events.add(again)


class _Items:
    """The items of a generator that is executed again: nobody iterates, so they come without a pause."""

    def __init__(self, task_id: str, take: Callable[[int, Location], None]) -> None:
        self.task_id = task_id
        self._take = take

    def add_item(self, channel: Channel, item: Item) -> bool:
        """Take a value that the task yielded, and let it go on."""
        if item.index % (AHEAD // 4) == 0:
            channel.post(Credit(self.task_id, item.index + 1))
        self._take(item.index, item.location)
        return False  # `_take` knows which of them are

    def finish(self, nitems: int | None, failed: Failed | None) -> None:
        """Do nothing: the end of the task is told by its result."""
