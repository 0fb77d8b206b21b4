"""Refs to objects of other processes: they are borrowed, resolved and released here.

The owner keeps an object while it is lent: until ``ReleaseBorrow``, or a moment after the borrower's channel
ended. A process that holds a ref for another (a caller for its call, a worker for what it returned)
releases it only when the owner knows of the new borrower: because it has acknowledged the borrow, or
because the release travels behind the ``Borrow``, on the same channel. A borrow whose channel closes before
that is not acknowledged until it is announced anew: the owner may never have got it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import ObjectFreedError, OwnerDiedError, StokerError
from stoker.runtime.objects.borrow_table import BorrowTable
from stoker.runtime.objects.recovery import freed
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
from stoker_wire.messages.objects import is_detached

if TYPE_CHECKING:
    from threading import Lock

    from stoker.runtime.net.channels import Channels
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.messages.common import Address

_BORROW_S = 30.0
"""How long to wait for the acknowledgement of an owner that is there but does not answer."""
GRACE_S = 1.0
"""How long the borrows of a process whose channel ended are kept: its last messages may have passed refs
on, whose receivers borrow them now; or only the channel was cut, and it comes back."""
_TRIES = 3

_log = logging.getLogger(__name__)


class _Detached(Protocol):
    """The objects that no process owns."""

    def import_ref(self, object_id: str) -> ObjectRef[Any]: ...
    def resolve(self, entry: Entry) -> None: ...


class _Objects(Protocol):
    """The object store whose objects are lent and borrowed."""

    lock: Lock

    @property
    def detached(self) -> _Detached: ...

    def settle(self, entry: Entry, location: Location) -> None: ...
    def free(self, entry: Entry) -> None: ...
    def mark_seen(self, location: Location) -> None: ...


class Borrowing:
    """The borrows of this process, and the messages about them."""

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
        """Borrows that were sent, by message number."""
        self._opening: set[asyncio.Task[None]] = set()
        """Borrows whose channels are being opened."""
        self._releasing = False

    # -- any thread ------------------------------------------------------------------------------

    def import_ref(self, object_id: str, owner: Address) -> ObjectRef[Any]:
        """Return a ref to an object named by another process; borrow it unless this process owns it."""
        if is_detached(object_id):
            return self._objects.detached.import_ref(object_id)
        with self._objects.lock:
            if owner.peer_id != self._address.peer_id:
                entry = self.borrows.borrow(object_id, owner)
            elif (owned := self._table.get(object_id)) is not None:
                entry = owned
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
        added = False
        for entry in entries:
            if entry.location is None and entry.owner is not None and not entry.resolve_requested:
                entry.resolve_requested = True
                self._to_resolve.append(entry)
                added = True
        if added:
            self._io.wake()

    # -- the owner (loop thread) -----------------------------------------------------------------

    def on_resolve(self, channel: Channel, message: Resolve) -> None:
        """Answer a borrower that asks where objects of this process are, now or once they are settled."""
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                channel.post(Resolved(object_id, freed(object_id, self._address)))
            elif entry.location is not None:
                self._objects.mark_seen(entry.location)
                channel.post(Resolved(object_id, entry.location))
            elif channel not in entry.subscribers:
                entry.subscribers.append(channel)

    def on_borrow(self, channel: Channel, message: Borrow) -> None:
        """Lend objects to another process, which holds refs to them."""
        with self._objects.lock:
            gone = self.borrows.lend(channel, message)
        channel.post(Borrowed(message.number, gone))

    def on_release_borrow(self, channel: Channel, message: ReleaseBorrow) -> None:
        """End the borrows of another process, which dropped its refs."""
        with self._objects.lock:
            unused = self.borrows.release(channel, message)
        for entry in unused:
            self._objects.free(entry)

    def _drop_borrower(self, channel: Channel) -> None:
        with self._objects.lock:
            unused = self.borrows.drop_borrower(channel)
        for entry in unused:
            self._objects.free(entry)

    # -- the borrower (loop thread) --------------------------------------------------------------

    def on_resolved(self, message: Resolved) -> None:
        """Settle an entry with the location that its owner sent."""
        entry = self._table.get(message.object_id)
        if entry is not None:
            self._objects.settle(entry, message.location)

    def on_borrowed(self, message: Borrowed) -> None:
        """Note that an owner knows of a borrow; fail those of objects that were gone."""
        self._acknowledge(message.number)
        for object_id in message.gone:
            entry = self._table.get(object_id)
            if entry is not None and entry.location is None:
                self._objects.settle(
                    entry,
                    encode_error(ObjectFreedError(f"{object_id} was freed before it was borrowed")),
                )

    def _acknowledge(self, number: int) -> None:
        _, future = self.unacknowledged.pop(number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    def _acknowledge_all(self, numbers: list[int]) -> None:
        for number in numbers:
            self._acknowledge(number)

    def flush(self) -> None:
        """Announce the refs borrowed since, and ask owners for the locations that user threads wait for."""
        if self._to_resolve:
            to_ask: dict[Channel, list[str]] = {}
            for entry in drain(self._to_resolve):
                if is_detached(entry.object_id) and entry.location is None:
                    self._objects.detached.resolve(entry)
                # An entry without a channel is resolved with its announcement.
                if isinstance(entry.channel, Channel) and entry.location is None:
                    to_ask.setdefault(entry.channel, []).append(entry.object_id)
            for channel, object_ids in to_ask.items():
                channel.post(Resolve(object_ids))
        if self.borrows.unannounced:
            for owner, group in _by_owner(drain(self.borrows.unannounced)):
                open_channel = self._channels.open_channel(owner.peer_id)
                if open_channel is None:
                    self._open_and_announce(owner, group)
                else:
                    self._announce(open_channel, group)

    def _announce(self, channel: Channel, entries: list[Entry]) -> asyncio.Future[None] | None:
        with self._objects.lock:
            message = self.borrows.announce(channel, entries)
        if message is None:
            return None
        future = self._io.loop.create_future()
        self.unacknowledged[message.number] = (channel, future)
        channel.post(message)
        to_ask = [e.object_id for e in entries if e.resolve_requested and e.location is None]
        if to_ask:
            channel.post(Resolve(to_ask))
        return future

    def _open_and_announce(self, owner: Address, entries: list[Entry]) -> asyncio.Task[None]:
        work = self._announce_to(owner, entries)
        task = self._io.background.spawn(work, name="borrow")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return task

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
            self._fail_owner_died(entry, why)

    def release_pinned(self, channel: Channel, pinned: list[str]) -> None:
        """Have a worker unpin the refs inside results, named by task or item, once they are borrowed here."""
        if self.would_overtake_borrow(channel):
            self._io.background.spawn(self._release_later(channel, pinned), name="release")
        else:
            channel.post(Release(pinned))

    async def _release_later(self, channel: Channel, pinned: list[str]) -> None:
        await self.wait_acknowledged(channel)
        channel.post(Release(pinned))

    async def wait_acknowledged(self, behind: Channel | None = None) -> None:
        """Wait until the owners have acknowledged every borrow begun so far (bounded).

        Borrows on the channel ``behind`` need no acknowledgement: the next message there comes after them.
        """
        waits = self._unacknowledged_borrows(behind)
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

    def would_overtake_borrow(self, behind: Channel) -> bool:
        """Return whether a message that leaves on this channel now would overtake an earlier borrow."""
        return bool(
            (self.borrows.unannounced or self.unacknowledged or self._opening)
            and self._unacknowledged_borrows(behind)
        )

    def _unacknowledged_borrows(self, behind: Channel | None) -> set[asyncio.Future[None]]:
        self.flush()
        waits: set[asyncio.Future[None]] = set(self._opening)
        waits.update(f for channel, f in self.unacknowledged.values() if channel is not behind)
        return waits

    def send_releases(self) -> None:
        """Release dropped refs, once the owners know of all that were borrowed before.

        A value that was read may hold refs which only that value kept alive.
        """
        if self.borrows.releasing and not self._releasing:
            if self._unacknowledged_borrows(None):
                self._releasing = True
                self._io.background.spawn(self._release_when_acknowledged(), name="unborrow")
            else:
                self._post_releases(list(self.borrows.releasing))

    async def _release_when_acknowledged(self) -> None:
        try:
            while object_ids := list(self.borrows.releasing):
                await self.wait_acknowledged()
                self._post_releases(object_ids)
        finally:
            self._releasing = False

    def _post_releases(self, object_ids: list[str]) -> None:
        with self._objects.lock:
            messages = self.borrows.take_releases(object_ids)
        for channel, message in messages:
            assert isinstance(channel, Channel)
            channel.post(message)

    # -- both (loop thread) ----------------------------------------------------------------------

    def on_channel_closed(self, channel: Channel) -> None:
        """Handle the end of a channel: its peer ended, or cannot be reached for the moment."""
        if channel in self.borrows.lent_by_channel:
            self._io.loop.call_later(GRACE_S, self._drop_borrower, channel)
        with self._objects.lock:
            entries = self.borrows.drop_lender(channel)
        opening = [self._open_and_announce(*group) for group in _by_owner(entries)]
        unanswered = [n for n, (at, _) in self.unacknowledged.items() if at is channel]
        if not opening:
            self._acknowledge_all(unanswered)  # nothing of them is held any more
        elif unanswered:
            # The owner may not have got them: it knows of them once it knows of the new ones.
            again = asyncio.gather(*opening, return_exceptions=True)
            again.add_done_callback(lambda _: self._acknowledge_all(unanswered))

    def _fail_owner_died(self, entry: Entry, why: str) -> None:
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
