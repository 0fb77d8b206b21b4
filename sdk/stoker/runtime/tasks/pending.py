"""The calls of this process that are not settled, of tasks and of actors alike.

The :class:`~stoker.runtime.tasks.task_spec.Submitter` of a call decides when and where it is sent. The part
that is the same for all is here: refs for the results, settling each once, and forgetting the call.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from stoker.exceptions import StokerError, TaskCancelledError
from stoker.runtime.objects.refs import ObjectRefGenerator
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.tasks.streams import Stream
from stoker.runtime.tasks.task_spec import PendingTask, Phase
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Cancel, Failed, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.runtime.net.channels import Channels
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.lineage import Lineage
    from stoker.runtime.tasks.status import TaskStatus
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.common import Address
    from stoker_wire.messages.data import Item, Location, Result


class PendingCalls:
    """All calls of this process that are not settled, by task id (``by_id``)."""

    def __init__(
        self,
        io: IoThread,
        channels: Channels,
        objects: ObjectStore,
        status: TaskStatus,
        by_id: dict[str, PendingTask],
        lineage: Lineage,
    ) -> None:
        self._io = io
        self._channels = channels
        self._objects = objects
        self.status = status
        self.by_id = by_id
        self._lineage = lineage
        self._again: dict[str, Callable[[Sequence[Location]], object]] = {}
        """Calls that are executed again: who takes their results."""
        self.lost: Failed | None = None
        """The error of every call, once the cluster is gone."""

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, task: PendingTask) -> Any:
        """Add a new call (any thread); return its ref, a list of refs, None, or a generator of refs."""
        template = task.spec.template
        result: Any
        if template.streaming:
            stream = Stream(task.task_id, self._io, self._objects, self.cancel_soon)
            stream.completed_ref._entry.task = task
            task.stream = stream
            result = ObjectRefGenerator(stream)
        else:
            new_ref, task_id = self._objects.new_ref, task.task_id
            refs = [new_ref(return_id(task_id, i)) for i in range(template.num_returns)]
            task.entries = tuple([ref._entry for ref in refs])
            for entry in task.entries:
                entry.task = task
            result = refs[0] if len(refs) == 1 else refs or None
        self.by_id[task.task_id] = task
        return result

    def add_again(self, task: PendingTask, on_end: Callable[[Sequence[Location]], object]) -> None:
        """Add a call that is executed again (loop thread); its results go to ``on_end`` alone."""
        self.by_id[task.task_id] = task
        self._again[task.task_id] = on_end

    def send_soon(self) -> None:
        """Have new calls sent (any thread): the only one at once, many together by the loop thread."""
        if len(self.by_id) == 1:
            self._io.flush_now()
        else:
            self._io.wake()

    # -- the loop thread -------------------------------------------------------------------------

    def complete(self, task: PendingTask, result: Result) -> None:
        """Settle a call's results and forget it."""
        settle = self._objects.settle
        locations = result.returns
        if task.trace:
            failure = locations[-1] if locations else None
            self.status.settled(task, failure if isinstance(failure, Failed) else None)
        if self._again and task.task_id in self._again:
            self._end_again(task, locations)
            return
        if task.stream is not None:
            self._end_items(task)
            self._forget(task)
            failure = locations[0] if locations and isinstance(locations[0], Failed) else None
            task.stream.finish(result.nitems, failure)
            return
        for location in locations:
            if type(location) is Stored:
                self._keep_lineage(task, locations)
                break
        else:
            self._objects.values.free(task.args)
        self._forget(task)
        if len(locations) != len(task.entries) or (
            len(locations) > 1 and type(locations[0]) is Failed
        ):
            locations = locations[:1] * len(task.entries)
        for entry, location in zip(task.entries, locations, strict=True):
            settle(entry, location)

    def fail(self, task: PendingTask, failed: Failed, *, report: bool = True) -> None:
        """Settle all results of a call with an error that its worker did not report."""
        if task.task_id not in self.by_id:
            return
        if report:
            self.status.ended(task, failed)
        if task.trace:
            self.status.settled(task, failed)
        if self._again and task.task_id in self._again:
            self._end_again(task, (failed,))
            return
        if task.stream is not None:
            self._end_items(task)
        else:
            self._objects.values.free(task.args)
        self._forget(task)
        if task.stream is not None:
            task.stream.finish(None, failed)
        for entry in task.entries:
            self._objects.settle(entry, failed)

    def _end_items(self, task: PendingTask) -> None:
        """Free the arguments of a generator that has ended, unless its items may be made again."""
        for args in (*self._lineage.end_items(task), *self._lineage.evict()):
            self._objects.values.free(args)

    def _keep_lineage(self, task: PendingTask, locations: Sequence[Location]) -> None:
        """Note how stored results were made; free the arguments that are not kept for that."""
        freed = [] if self._lineage.keep(task, locations) else [task.args]
        for args in (*freed, *self._lineage.evict()):
            self._objects.values.free(args)

    def _end_again(self, task: PendingTask, locations: Sequence[Location]) -> None:
        self._forget(task)  # its arguments may be needed once more
        self._again.pop(task.task_id)(locations)

    def _forget(self, task: PendingTask) -> None:
        self.by_id.pop(task.task_id, None)
        if task.slot is not None:
            task.slot.pop(task.task_id)
        task.phase = Phase.ENDED
        task.slot = task.channel = None
        task.deps = task.nested = ()

    def on_item(self, channel: Channel, message: Item) -> None:
        """Handle a value that a streaming task or method yielded."""
        task = self.by_id.get(message.task_id)
        if task is not None and task.stream is not None and task.attempt == message.attempt:
            is_new = task.stream.add_item(channel, message)
            if is_new and type(message.location) is Stored:
                self._lineage.keep_item(task)
        else:
            self._objects.discard([message.location])
        if message.location.refs:
            object_id = return_id(message.task_id, message.index)
            self._objects.borrowing.release_pinned(channel, [object_id])

    def cancel(self, task_id: str, *, force: bool, recursive: bool) -> None:
        """Stop a call, unless it is settled."""
        task = self.by_id.get(task_id)
        if task is not None:
            task.cancelled = True
            task.spec.submitter.cancel(task, force=force, recursive=recursive)

    def cancel_children(self, parent_task_id: str, *, force: bool) -> None:
        """Stop all calls that a task has submitted (``cancel(recursive=True)``)."""
        for task in list(self.by_id.values()):
            if task.parent_task_id == parent_task_id:
                self.cancel(task.task_id, force=force, recursive=True)

    def lose_cluster(self, failed: Failed) -> None:
        """Fail all calls, present and future: the cluster, or the job there, is gone for good."""
        self.lost = self._objects.unseen.expected = failed
        for task in list(self.by_id.values()):
            self.fail(task, failed, report=False)

    def close(self) -> None:
        """Fail all calls, so that nobody waits for ever."""
        for task in list(self.by_id.values()):
            text = f"task {task.spec.name} ({task.task_id}) ended with stoker.shutdown()"
            self.fail(task, encode_error(TaskCancelledError(text)))

    # -- any thread ------------------------------------------------------------------------------

    def cancel_soon(self, task_id: str, *, force: bool = False, recursive: bool = True) -> None:
        """Stop a call of this process (from any thread)."""
        self._io.call_soon(lambda: self.cancel(task_id, force=force, recursive=recursive))

    def cancel_at(self, owner: Address, task_id: str, *, force: bool, recursive: bool) -> None:
        """Have another process stop a task that it submitted, if that process is still there."""

        async def send() -> None:
            with contextlib.suppress(StokerError):
                (await self._channels.channel(owner)).post(Cancel(task_id, force, recursive))

        self._io.call_soon(lambda: self._io.background.spawn(send(), name="cancel"))
