"""Refs to objects of other processes: borrowing them, asking where they are, giving them back.

The owner keeps an object while it is lent: until ``ReleaseBorrow``, or a moment after the borrower's line
ended. Whoever holds a ref for somebody else (a caller for its call, a worker for what it returned)
lets go only when the owner knows of the new borrower: because it has said so, or because the word
that lets go travels behind the ``Borrow``, on the same line.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ObjectFreedError, OwnerDiedError, StokerError
from stoker.runtime.objects.borrow_table import Loans
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.objects.table import Entry
from stoker.runtime.objects.values import drain
from stoker.runtime.serialization.exceptions import failed_with
from stoker_wire.data.channel import Channel
from stoker_wire.messages.data import Borrow, Borrowed, Release, ReleaseBorrow, Resolve, Resolved

if TYPE_CHECKING:
    from stoker.runtime.objects.store import Objects
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.common import Address

_BORROW_S = 30.0
"""How long to wait for the word of an owner that is there but does not answer."""
GRACE_S = 1.0
"""What a process that ended had borrowed is kept for so long: its last words may have passed refs
on, whose receivers borrow them now; or only its line was cut, and it comes back."""
_TRIES = 3
_ASKED = object()

_log = logging.getLogger("stoker.borrowing")


class Borrowing:
    """The half of the object table that concerns other processes."""

    def __init__(self, runtime: Runtime, objects: Objects) -> None:
        self.loans = Loans(objects.table)
        self._runtime = runtime
        self._objects = objects
        self._table = objects.table
        self._to_resolve: deque[Entry] = deque()
        self.unacknowledged: dict[int, tuple[Channel, asyncio.Future[None]]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._returning = False

    # -- any thread ------------------------------------------------------------------------------

    def adopt(self, object_id: str, owner: Address) -> ObjectRef[Any]:
        """Return a ref to an object named by another process; borrow it if it is not ours."""
        with self._objects.lock:
            if owner.peer_id != self._runtime.address.peer_id:
                entry = self.loans.adopt(object_id, owner)
            elif (mine := self._table.get(object_id)) is not None:
                entry = mine
                entry.refs += 1
            else:
                entry = Entry(object_id)
                entry.place = failed_with(
                    ObjectFreedError(f"{object_id} was freed\nno ref to it was left")
                )
        if self.loans.fresh:
            self._runtime.wake()
        return ObjectRef(entry)

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

    # -- the owner (loop thread) -----------------------------------------------------------------

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
                                f"{self._runtime.address.peer_id}\n"
                                "no ref to it was left there"
                            )
                        ),
                    )
                )
            elif entry.place is not None:
                self._objects.unseen.seen(entry.place)
                line.post(Resolved(object_id, entry.place))
            elif line not in entry.subscribers:
                entry.subscribers.append(line)

    def on_borrow(self, line: Channel, message: Borrow) -> None:
        """Another process holds refs to objects of ours."""
        with self._objects.lock:
            gone = self.loans.lend(line, message)
        line.post(Borrowed(message.number, gone))

    def on_unborrow(self, line: Channel, message: ReleaseBorrow) -> None:
        """Another process dropped its refs."""
        with self._objects.lock:
            freed = self.loans.take_back(line, message)
        for entry in freed:
            self._objects.free(entry)

    def _borrower_lost(self, line: Channel) -> None:
        with self._objects.lock:
            freed = self.loans.borrower_lost(line)
        for entry in freed:
            self._objects.free(entry)

    # -- the borrower (loop thread) --------------------------------------------------------------

    def on_resolved(self, message: Resolved) -> None:
        """An owner said where an object is."""
        entry = self._table.get(message.object_id)
        if entry is not None:
            self._objects.settle(entry, message.place)

    def on_borrowed(self, message: Borrowed) -> None:
        """An owner noted our borrow."""
        self._heard(message.number)
        for object_id in message.gone:
            entry = self._table.get(object_id)
            if entry is not None and entry.place is None:
                self._objects.settle(
                    entry,
                    failed_with(ObjectFreedError(f"{object_id} was freed before it was borrowed")),
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
                # One without a line is asked for with its announcement.
                if isinstance(entry.line, Channel) and entry.place is None:
                    asked.setdefault(entry.line, []).append(entry.object_id)
            for line, object_ids in asked.items():
                line.post(Resolve(object_ids))
        if self.loans.fresh:
            for owner, theirs in _by_owner(drain(self.loans.fresh)):
                known = self._runtime.peers.open_line(owner.peer_id)
                if known is None:
                    self._open(owner, theirs)
                else:
                    self._announce(known, theirs)

    def _announce(self, line: Channel, entries: list[Entry]) -> asyncio.Future[None] | None:
        with self._objects.lock:
            message = self.loans.announce(line, entries)
        if message is None:
            return None
        future = self._runtime.loop.create_future()
        self.unacknowledged[message.number] = (line, future)
        line.post(message)
        asked = [e.object_id for e in entries if e.task is _ASKED and e.place is None]
        if asked:
            line.post(Resolve(asked))
        return future

    def _open(self, owner: Address, entries: list[Entry]) -> None:
        work = self._announce_to(owner, entries)
        task = self._runtime.background.spawn(work, name="borrow")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _announce_to(self, owner: Address, entries: list[Entry]) -> None:
        why = "its line closes as soon as it is open"
        for _ in range(_TRIES):
            try:
                line = await self._runtime.peers.line(owner)
            except StokerError as error:
                why = str(error)
                break
            if not line.closed:
                future = self._announce(line, entries)
                if future is not None:
                    await asyncio.wait([future], timeout=_BORROW_S)
                return
        for entry in entries:
            self._owner_gone(entry, why)

    def release(self, line: Channel, kept: list[str]) -> None:
        """Tell the process that keeps refs for us, of these results, once they are borrowed."""
        if self.under_way(line):
            self._runtime.background.spawn(self._release_later(line, kept), name="release")
        else:
            line.post(Release(kept))

    async def _release_later(self, line: Channel, kept: list[str]) -> None:
        await self.acknowledged(line)
        line.post(Release(kept))

    async def acknowledged(self, behind: Channel | None = None) -> None:
        """Wait until the owners know of every borrow begun so far (bounded).

        For a message that leaves on the line ``behind``, what went before it there is known.
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
                    ", ".join(sorted(owners)) or "their lines do not open",
                )

    def under_way(self, behind: Channel) -> bool:
        """Whether a message that leaves on this line now would overtake a borrow begun before."""
        return bool(
            (self.loans.fresh or self.unacknowledged or self._opening) and self._under_way(behind)
        )

    def _under_way(self, behind: Channel | None) -> set[asyncio.Future[None]]:
        self.flush()
        waits: set[asyncio.Future[None]] = set(self._opening)
        waits.update(f for line, f in self.unacknowledged.values() if line is not behind)
        return waits

    def give_back(self) -> None:
        """Tell the owners of dropped refs, once they know of those that were adopted before.

        A value that was read may hold refs which only that value kept alive.
        """
        if self.loans.returning and not self._returning:
            if self._under_way(None):
                self._returning = True
                self._runtime.background.spawn(self._give_back_later(), name="unborrow")
            else:
                self._give_back(list(self.loans.returning))

    async def _give_back_later(self) -> None:
        try:
            while object_ids := list(self.loans.returning):
                await self.acknowledged()
                self._give_back(object_ids)
        finally:
            self._returning = False

    def _give_back(self, object_ids: list[str]) -> None:
        with self._objects.lock:
            messages = self.loans.give_back(object_ids)
        for line, message in messages:
            assert isinstance(line, Channel)
            line.post(message)

    # -- ends ------------------------------------------------------------------------------------

    def on_line_lost(self, line: Channel) -> None:
        """A line closed: its peer ended, or cannot be reached for the moment."""
        for number, (asked, _) in list(self.unacknowledged.items()):
            if asked is line:
                self._heard(number)  # nobody is left to answer
        if line in self.loans.lent:
            self._runtime.loop.call_later(GRACE_S, self._borrower_lost, line)
        with self._objects.lock:
            entries = self.loans.lender_lost(line)
        for owner, theirs in _by_owner(entries):
            self._open(owner, theirs)

    def _owner_gone(self, entry: Entry, why: str) -> None:
        owner = entry.owner
        self._objects.settle(
            entry,
            failed_with(
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
