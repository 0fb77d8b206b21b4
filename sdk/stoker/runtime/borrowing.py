"""Refs to objects of other processes: borrowing them, asking where they are, giving them back.

The owner keeps an object while a borrower's line lives and has not said ``Unborrow``. A worker
answers a call only after the owners have acknowledged the refs that it kept, so nothing is freed in
between.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker._refs import ObjectRef
from stoker.core.objects import Entry
from stoker.exceptions import ObjectFreedError, OwnerDiedError, StokerError
from stoker.runtime.failures import failed_with
from stoker.runtime.values import drain
from stoker_wire.messages.data import Borrow, Borrowed, Resolve, Resolved, Unborrow

if TYPE_CHECKING:
    from stoker.runtime.objects import Objects
    from stoker.runtime.runtime import Runtime
    from stoker_wire.channel import Channel
    from stoker_wire.messages.common import Address

_BORROW_S = 10.0
_ASKED = object()


class Borrowing:
    """The half of the object table that concerns other processes."""

    def __init__(self, runtime: Runtime, objects: Objects) -> None:
        self._runtime = runtime
        self._objects = objects
        self._table = objects.table
        self._to_borrow: deque[Entry] = deque()
        self._to_resolve: deque[Entry] = deque()
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[int, tuple[Channel, asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0

    # -- any thread ------------------------------------------------------------------------------

    def adopt(self, object_id: str, owner: Address) -> ObjectRef[Any]:
        """Return a ref to an object named by another process; borrow it if it is not ours."""
        with self._objects.lock:
            entry = self._table.get(object_id)
            if entry is None:
                if owner.peer_id == self._runtime.address.peer_id:
                    entry = Entry(object_id)
                    entry.place = failed_with(
                        ObjectFreedError(f"{object_id} was freed: no ref to it was left")
                    )
                else:
                    entry = self._table.create(object_id, owner)
                    self._under_way += 1
                    self._to_borrow.append(entry)
                    self._runtime.wake()
            ref: ObjectRef[Any] | None = entry.ref() if entry.ref is not None else None
            if ref is None:
                ref = ObjectRef(entry)
                entry.ref = weakref.ref(ref)
            return ref

    def request(self, entries: Iterable[Entry]) -> None:
        """Ask the owners of borrowed, unsettled entries where they are (once each)."""
        asked = False
        for entry in entries:
            if entry.place is None and entry.owner is not None and entry.task is None:
                entry.task = _ASKED
                self._to_resolve.append(entry)
                asked = True
        if asked:
            self._runtime.wake()

    # -- the loop thread -------------------------------------------------------------------------

    def on_resolve(self, line: Channel, message: Resolve) -> None:
        """A borrower asks where objects of ours are."""
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                line.post(
                    Resolved(
                        object_id,
                        failed_with(
                            ObjectFreedError(
                                f"{object_id} was freed by its owner "
                                f"{self._runtime.address.peer_id}: no ref to it was left there"
                            )
                        ),
                    )
                )
            elif entry.place is not None:
                line.post(Resolved(object_id, entry.place))
            else:
                entry.subscribers.append(line)

    def on_resolved(self, message: Resolved) -> None:
        """An owner answered."""
        entry = self._table.get(message.object_id)
        if entry is not None:
            self._objects.settle(entry, message.place)

    def on_borrow(self, line: Channel, message: Borrow) -> None:
        """Another process holds refs to objects of ours."""
        with self._objects.lock:
            gone = self._table.borrow(message.object_ids, line.peer.peer_id)
        line.post(Borrowed(message.number, gone))

    def on_borrowed(self, message: Borrowed) -> None:
        """An owner noted our borrow."""
        _, future = self._unacknowledged.pop(message.number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)
        for object_id in message.gone:
            entry = self._table.get(object_id)
            if entry is not None and entry.place is None:
                self._objects.settle(
                    entry,
                    failed_with(ObjectFreedError(f"{object_id} was freed before it was borrowed")),
                )

    def on_unborrow(self, line: Channel, message: Unborrow) -> None:
        """Another process dropped its refs."""
        with self._objects.lock:
            freed = self._table.unborrow(message.object_ids, line.peer.peer_id)
        for entry in freed:
            self._objects.free(entry)

    def on_line_lost(self, line: Channel) -> None:
        """A peer is gone: its borrows end, and what it owned and had not given us is lost."""
        peer_id = line.peer.peer_id
        with self._objects.lock:
            freed = self._table.borrower_gone(peer_id)
            orphans = [
                e
                for e in self._table.entries.values()
                if e.owner is not None and e.owner.peer_id == peer_id and e.place is None
            ]
        for asked, future in self._unacknowledged.values():
            if asked is line and not future.done():
                future.set_result(None)  # nobody is left to answer
        for entry in freed:
            self._objects.free(entry)
        for entry in orphans:
            self._owner_gone(entry, "its process ended")

    def flush(self) -> None:
        """Send what user threads left to be asked."""
        if self._to_borrow:
            work = self._borrow(drain(self._to_borrow))
            task = self._runtime.background.spawn(work, name="borrow")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._to_resolve:
            self._runtime.background.spawn(self._resolve(drain(self._to_resolve)), name="resolve")

    def give_back(self, entries: list[Entry]) -> None:
        """Tell the owners that no ref to these is left here."""
        groups = {
            owner.peer_id: (owner, [e.object_id for e in of]) for owner, of in _by_owner(entries)
        }
        if groups:
            self._runtime.background.spawn(self._unborrow(groups), name="unborrow")

    async def acknowledged(self) -> None:
        """Wait until the owners know of every borrow begun so far (bounded)."""
        self.flush()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_BORROW_S)

    @property
    def under_way(self) -> bool:
        """Whether a borrow is not acknowledged yet."""
        return self._under_way > 0

    async def _borrow(self, entries: list[Entry]) -> None:
        try:
            for owner, theirs in _by_owner(entries):
                try:
                    line = await self._runtime.peers.line(owner)
                except StokerError as error:
                    for entry in theirs:
                        self._owner_gone(entry, str(error))
                    continue
                number = next(self._numbers)
                future = self._runtime.loop.create_future()
                self._unacknowledged[number] = (line, future)
                line.post(Borrow(number, [e.object_id for e in theirs]))
                if not line.closed:
                    await asyncio.wait([future], timeout=_BORROW_S)
                self._unacknowledged.pop(number, None)
        finally:
            self._under_way -= len(entries)

    async def _resolve(self, entries: list[Entry]) -> None:
        for owner, theirs in _by_owner(entries):
            try:
                line = await self._runtime.peers.line(owner)
            except StokerError as error:
                for entry in theirs:
                    self._owner_gone(entry, str(error))
            else:
                line.post(Resolve([e.object_id for e in theirs]))

    async def _unborrow(self, groups: dict[str, tuple[Address, list[str]]]) -> None:
        # A value read from an object may hold refs whose borrow is still under way.
        await self.acknowledged()
        for owner, object_ids in groups.values():
            line = self._runtime.peers.open_line(owner.peer_id)
            # An object may have been borrowed anew since it was dropped.
            gone = [i for i in object_ids if self._table.get(i) is None]
            if line is not None and gone:
                line.post(Unborrow(gone))

    def _owner_gone(self, entry: Entry, why: str) -> None:
        owner = entry.owner
        self._objects.settle(
            entry,
            failed_with(
                OwnerDiedError(
                    f"{entry.object_id} cannot be had: its owner "
                    f"{owner.peer_id if owner else '?'} does not answer ({why}). A ref is good "
                    "only while the process that made it lives, and within one cluster."
                )
            ),
        )


def _by_owner(entries: list[Entry]) -> list[tuple[Address, list[Entry]]]:
    groups: dict[str, tuple[Address, list[Entry]]] = {}
    for entry in entries:
        if entry.owner is not None:
            groups.setdefault(entry.owner.peer_id, (entry.owner, []))[1].append(entry)
    return list(groups.values())
