"""Refs to objects of other processes: borrowing them, asking where they are, giving them back.

The owner keeps an object while it is lent: until ``ReleaseBorrow``, or a moment after the borrower's channel
ended. Whoever holds a ref for somebody else (a caller for its call, a worker for what it returned)
lets go only when the owner knows of the new borrower: because it has said so, or because the word
that lets go travels behind the ``Borrow``, on the same channel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import ObjectFreedError, OwnerDiedError, StokerError
from stoker.runtime.objects.borrow_table import BorrowTable
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker.runtime.objects.values import drain
from stoker.runtime.serialization.exceptions import encode_error
from stoker_wire.data.channel import Channel
from stoker_wire.messages.data import (
    Borrow,
    Borrowed,
    Location,
    Release,
    ReleaseBorrow,
    Resolve,
    Resolved,
)

if TYPE_CHECKING:
    from threading import Lock

    from stoker.runtime.net.channels import Channels
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.messages.common import Address

_BORROW_S = 30.0
"""How long to wait for the word of an owner that is there but does not answer."""
GRACE_S = 1.0
"""What a process that ended had borrowed is kept for so long: its last words may have passed refs
on, whose receivers borrow them now; or only its channel was cut, and it comes back."""
_TRIES = 3

_log = logging.getLogger("stoker.borrowing")


class _Objects(Protocol):
    """The store whose objects are lent and borrowed."""

    lock: Lock

    def settle(self, entry: Entry, location: Location) -> None: ...
    def free(self, entry: Entry) -> None: ...
    def seen(self, location: Location) -> None: ...


class Borrowing:
    """The half of the object store that concerns other processes."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        table: ObjectTable,
        objects: _Objects,
    ) -> None:
        self.borrows = BorrowTable(table)
        self._address = address
        self._io = io
        self._channels = channels
        self._objects = objects
        self._table = table
        self._to_resolve: deque[Entry] = deque()
        self.unacknowledged: dict[int, tuple[Channel, asyncio.Future[None]]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._returning = False

    # -- any thread ------------------------------------------------------------------------------

    def adopt(self, object_id: str, owner: Address) -> ObjectRef[Any]:
        """Return a ref to an object named by another process; borrow it if it is not ours."""
        with self._objects.lock:
            if owner.peer_id != self._address.peer_id:
                entry = self.borrows.adopt(object_id, owner)
            elif (mine := self._table.get(object_id)) is not None:
                entry = mine
                entry.refs += 1
            else:
                entry = Entry(object_id)
                entry.location = encode_error(
                    ObjectFreedError(f"{object_id} was freed\nno ref to it was left")
                )
        if self.borrows.unannounced:
            self._io.wake()
        return ObjectRef(entry)

    def request(self, entries: Iterable[Entry]) -> None:
        """Ask the owners of borrowed, unsettled entries where they are (once each)."""
        asked = False
        for entry in entries:
            if entry.location is None and entry.owner is not None and not entry.asked:
                entry.asked = True
                self._to_resolve.append(entry)
                asked = True
        if asked:
            self._io.wake()

    # -- the owner (loop thread) -----------------------------------------------------------------

    def on_resolve(self, channel: Channel, message: Resolve) -> None:
        """A borrower asks where objects of ours are."""
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                channel.post(
                    Resolved(
                        object_id,
                        encode_error(
                            ObjectFreedError(
                                f"{object_id} was freed by its owner "
                                f"{self._address.peer_id}\n"
                                "no ref to it was left there"
                            )
                        ),
                    )
                )
            elif entry.location is not None:
                self._objects.seen(entry.location)
                channel.post(Resolved(object_id, entry.location))
            elif channel not in entry.subscribers:
                entry.subscribers.append(channel)

    def on_borrow(self, channel: Channel, message: Borrow) -> None:
        """Another process holds refs to objects of ours."""
        with self._objects.lock:
            gone = self.borrows.lend(channel, message)
        channel.post(Borrowed(message.number, gone))

    def on_release_borrow(self, channel: Channel, message: ReleaseBorrow) -> None:
        """Another process dropped its refs."""
        with self._objects.lock:
            freed = self.borrows.release(channel, message)
        for entry in freed:
            self._objects.free(entry)

    def _borrower_lost(self, channel: Channel) -> None:
        with self._objects.lock:
            freed = self.borrows.borrower_lost(channel)
        for entry in freed:
            self._objects.free(entry)

    # -- the borrower (loop thread) --------------------------------------------------------------

    def on_resolved(self, message: Resolved) -> None:
        """An owner said where an object is."""
        entry = self._table.get(message.object_id)
        if entry is not None:
            self._objects.settle(entry, message.location)

    def on_borrowed(self, message: Borrowed) -> None:
        """An owner noted our borrow."""
        self._heard(message.number)
        for object_id in message.gone:
            entry = self._table.get(object_id)
            if entry is not None and entry.location is None:
                self._objects.settle(
                    entry,
                    encode_error(ObjectFreedError(f"{object_id} was freed before it was borrowed")),
                )

    def _heard(self, number: int) -> None:
        _, future = self.unacknowledged.pop(number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    def flush(self) -> None:
        """Tell owners of what was adopted since, and ask them what user threads want to know."""
        if self._to_resolve:
            asked: dict[Channel, list[str]] = {}
            for entry in drain(self._to_resolve):
                # One without a channel is asked for with its announcement.
                if isinstance(entry.channel, Channel) and entry.location is None:
                    asked.setdefault(entry.channel, []).append(entry.object_id)
            for channel, object_ids in asked.items():
                channel.post(Resolve(object_ids))
        if self.borrows.unannounced:
            for owner, theirs in _by_owner(drain(self.borrows.unannounced)):
                known = self._channels.open_channel(owner.peer_id)
                if known is None:
                    self._open(owner, theirs)
                else:
                    self._announce(known, theirs)

    def _announce(self, channel: Channel, entries: list[Entry]) -> asyncio.Future[None] | None:
        with self._objects.lock:
            message = self.borrows.announce(channel, entries)
        if message is None:
            return None
        future = self._io.loop.create_future()
        self.unacknowledged[message.number] = (channel, future)
        channel.post(message)
        asked = [e.object_id for e in entries if e.asked and e.location is None]
        if asked:
            channel.post(Resolve(asked))
        return future

    def _open(self, owner: Address, entries: list[Entry]) -> None:
        work = self._announce_to(owner, entries)
        task = self._io.background.spawn(work, name="borrow")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _announce_to(self, owner: Address, entries: list[Entry]) -> None:
        why = "its channel closes as soon as it is open"
        for _ in range(_TRIES):
            try:
                channel = await self._channels.channel(owner)
            except StokerError as error:
                why = str(error)
                break
            if not channel.closed:
                future = self._announce(channel, entries)
                if future is not None:
                    await asyncio.wait([future], timeout=_BORROW_S)
                return
        for entry in entries:
            self._owner_gone(entry, why)

    def release_pinned(self, channel: Channel, kept: list[str]) -> None:
        """Tell the process that keeps refs for us, of these results, once they are borrowed."""
        if self.under_way(channel):
            self._io.background.spawn(self._release_later(channel, kept), name="release")
        else:
            channel.post(Release(kept))

    async def _release_later(self, channel: Channel, kept: list[str]) -> None:
        await self.acknowledged(channel)
        channel.post(Release(kept))

    async def acknowledged(self, behind: Channel | None = None) -> None:
        """Wait until the owners know of every borrow begun so far (bounded).

        For a message that leaves on the channel ``behind``, what went before it there is known.
        """
        waits = self._under_way(behind)
        if waits:
            _, late = await asyncio.wait(waits, timeout=_BORROW_S)
            if late:
                owners = {x.peer.peer_id for x, f in self.unacknowledged.values() if f in late}
                _log.warning(
                    "owners did not answer within %g s that they know of %d borrow(s): %s",
                    _BORROW_S,
                    len(late),
                    ", ".join(sorted(owners)) or "their channels do not open",
                )

    def under_way(self, behind: Channel) -> bool:
        """Whether a message that leaves on this channel now would overtake a borrow begun before."""
        return bool(
            (self.borrows.unannounced or self.unacknowledged or self._opening)
            and self._under_way(behind)
        )

    def _under_way(self, behind: Channel | None) -> set[asyncio.Future[None]]:
        self.flush()
        waits: set[asyncio.Future[None]] = set(self._opening)
        waits.update(f for channel, f in self.unacknowledged.values() if channel is not behind)
        return waits

    def send_releases(self) -> None:
        """Tell the owners of dropped refs, once they know of those that were adopted before.

        A value that was read may hold refs which only that value kept alive.
        """
        if self.borrows.releasing and not self._returning:
            if self._under_way(None):
                self._returning = True
                self._io.background.spawn(self._give_back_later(), name="unborrow")
            else:
                self._give_back(list(self.borrows.releasing))

    async def _give_back_later(self) -> None:
        try:
            while object_ids := list(self.borrows.releasing):
                await self.acknowledged()
                self._give_back(object_ids)
        finally:
            self._returning = False

    def _give_back(self, object_ids: list[str]) -> None:
        with self._objects.lock:
            messages = self.borrows.send_releases(object_ids)
        for channel, message in messages:
            assert isinstance(channel, Channel)
            channel.post(message)

    # -- ends ------------------------------------------------------------------------------------

    def on_channel_closed(self, channel: Channel) -> None:
        """A channel closed: its peer ended, or cannot be reached for the moment."""
        for number, (asked, _) in list(self.unacknowledged.items()):
            if asked is channel:
                self._heard(number)  # nobody is left to answer
        if channel in self.borrows.lent:
            self._io.loop.call_later(GRACE_S, self._borrower_lost, channel)
        with self._objects.lock:
            entries = self.borrows.lender_lost(channel)
        for owner, theirs in _by_owner(entries):
            self._open(owner, theirs)

    def _owner_gone(self, entry: Entry, why: str) -> None:
        owner = entry.owner
        self._objects.settle(
            entry,
            encode_error(
                OwnerDiedError(
                    f"{entry.object_id} cannot be had: its owner "
                    f"{owner.peer_id if owner else '?'} does not answer\n"
                    f"{why}\n"
                    "a ref is good only while the process that made it lives, and within one "
                    "cluster"
                )
            ),
        )


def _by_owner(entries: list[Entry]) -> list[tuple[Address, list[Entry]]]:
    groups: dict[str, tuple[Address, list[Entry]]] = {}
    for entry in entries:
        if entry.owner is not None:
            groups.setdefault(entry.owner.peer_id, (entry.owner, []))[1].append(entry)
    return list(groups.values())
