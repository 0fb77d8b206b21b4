"""The caller's half of a streaming generator: items as refs, in order, with flow control by credit."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from stoker.runtime.objects.waiters import LoopWaiter, ThreadWaiter
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Credit, Failed, Inline, Item, Stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.data.channel import Channel

AHEAD = 256
"""How many items a worker may yield ahead of the consumer."""
_NONE = Inline(b"\x80\x05N.")


class ItemSink(Protocol):
    """The receiver of what a generator yields (loop thread)."""

    def add_item(self, channel: Channel, item: Item) -> bool:
        """Take a value that the task yielded; return whether it is a new one of this owner's."""

    def finish(self, nitems: int | None, failed: Failed | None) -> None:
        """Note that the task ended."""


class Stream:
    """The items that came, and the consumer that waits for the next one. One consumer at a time."""

    def __init__(
        self, task_id: str, io: IoThread, objects: ObjectStore, cancel: Callable[[str], object]
    ) -> None:
        self.task_id = task_id
        self.completed_ref = objects.new_ref(return_id(task_id, "end"))
        self._io = io
        self._objects = objects
        self._cancel = cancel
        self._items: deque[ObjectRef[Any]] = deque()
        self._count = 0
        self._taken = 0
        self._ended = False
        self._abandoned = False
        self._last = 0, -1
        """The attempt and the index of the last item that came."""
        self._home: Stored | None = None
        """Where that attempt stores its items, if it has stored any."""
        self._cut: list[tuple[Stored, int]] = []
        """Where attempts that were lost stored theirs, and the first one that did not come."""
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._waiter: ThreadWaiter | LoopWaiter | None = None
        self._watchers: list[ThreadWaiter] = []
        """Threads that wait for this stream among other things, by ``wait()``."""

    # -- the loop thread -------------------------------------------------------------------------

    def add_item(self, channel: Channel, item: Item) -> bool:
        """Add a value that the task yielded; return whether it is a new one.

        A retry yields old ones again: they are not given twice, but may take the places of the old.
        """
        if item.attempt > self._last[0]:
            self._cut_off()
        self._channel, self._last = channel, (item.attempt, item.index)
        if type(item.location) is Stored:
            self._home = item.location
        objects, index, location = self._objects, item.index, item.location
        if index == 0 and self._taken:
            # Another attempt starts without credit, and the consumer grants none before it takes the
            # first new item.
            channel.post(Credit(self.task_id, self._taken))
        if self._abandoned:
            objects.discard([location])
            return False
        if index < self._count:
            objects.replace(return_id(self.task_id, index), location)
            return False
        ref = objects.new_ref(return_id(self.task_id, index))
        objects.settle(ref._entry, location)
        with self._lock:
            self._count = index + 1
            self._items.append(ref)
        self._wake()
        return True

    def is_past(self, attempt: int, index: int) -> bool:
        """Return whether an attempt has yielded its ``index``-th value."""
        return self._last >= (attempt, index)

    def finish(self, nitems: int | None, failed: Failed | None) -> None:
        """Note that the task ended. The last ref raises its error, if any."""
        if nitems is None:
            self._cut_off()
        self._free_unreported()
        if failed is not None:
            ref = self._objects.new_ref(return_id(self.task_id, self._count))
            self._objects.settle(ref._entry, failed)
            with self._lock:
                self._items.append(ref)
        self._objects.settle(self.completed_ref._entry, failed or _NONE)
        with self._lock:
            self._ended = True
        self._wake()

    def _cut_off(self) -> None:
        """Note that the last attempt was lost with its worker."""
        if self._home is not None:
            self._cut.append((self._home, self._last[1] + 1))
            self._home = None

    def _free_unreported(self) -> None:
        """Free what workers stored just before they died, and could not report: nobody else knows of it."""
        for home, first in self._cut:
            for index in range(first, first + AHEAD):
                lost = structs.replace(home, object_id=return_id(self.task_id, index), refs=())
                self._objects.discard([lost])

    def _wake(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.settled()
        with self._objects.lock:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.settled()

    # -- user threads and loops ------------------------------------------------------------------

    def next_sync(self) -> ObjectRef[Any] | None:
        """Return the next item's ref, or None at the end; waits without a deadline of its own."""
        while True:
            with self._lock:
                ref, waiter = self._take(), None
                if ref is None and not self._ended:
                    waiter = self._waiter = ThreadWaiter()
                    waiter.missing = 1
            if waiter is None:
                return self._grant_credit(ref)
            self._objects.waits.wait(waiter, None, "next()", [self.completed_ref._entry])

    async def next_async(self) -> ObjectRef[Any] | None:
        """Return the next item's ref, or None at the end; for a coroutine of any loop."""
        while True:
            with self._lock:
                ref, waiter = self._take(), None
                if ref is None and not self._ended:
                    waiter = self._waiter = LoopWaiter()
            if waiter is None:
                return self._grant_credit(ref)
            entries = [self.completed_ref._entry]
            await self._objects.waits.wait_async(waiter.future, "anext()", entries)

    @property
    def is_ready(self) -> bool:
        """Whether the next item, or the end, can be had without waiting."""
        return bool(self._items) or self._ended

    def watch(self, waiter: ThreadWaiter) -> None:
        """Count the next item, or the end, for ``waiter`` (the caller holds the lock of the objects)."""
        self._watchers.append(waiter)

    def unwatch(self, waiter: ThreadWaiter) -> None:
        """Undo :meth:`watch` (the caller holds the lock of the objects)."""
        if waiter in self._watchers:
            self._watchers.remove(waiter)

    def _take(self) -> ObjectRef[Any] | None:
        if not self._items:
            return None
        self._taken += 1
        return self._items.popleft()

    def _grant_credit(self, ref: ObjectRef[Any] | None) -> ObjectRef[Any] | None:
        channel = self._channel
        if ref is not None and channel is not None and self._taken % (AHEAD // 4) == 0:
            self._io.call_soon(channel.post, Credit(self.task_id, self._taken))
        return ref

    def abandon(self) -> None:
        """Stop the task, and drop all items: nobody will take any more."""
        self._abandoned = True
        self._items.clear()
        if not self._ended and self._io.running:
            self._cancel(self.task_id)
