"""Borrowing, without the sending: what this process lent on which channel, and what it borrowed.

The owner of an object keeps it while it is lent. What is lent is bound to the channel on which it was
asked for, so a borrower with two channels, or with a new one after a cut, is counted right. Messages of
one channel arrive in order; each has a number, so that one which comes twice is done once.

Pure: :mod:`stoker.runtime.objects.borrowing` sends and waits, and calls everything here under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from stoker_wire.messages.data import Borrow, ReleaseBorrow

if TYPE_CHECKING:
    from stoker.runtime.objects.table import Entry, ObjectTable
    from stoker_wire.messages.common import Address


class BorrowTable:
    """Both halves of borrowing, for one process."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self.lent: dict[Hashable, dict[str, Entry]] = {}
        """As owner: what is lent on each channel."""
        self._last_number: dict[Hashable, int] = {}
        self.borrowed: dict[Hashable, set[Entry]] = {}
        """As borrower: what is announced on each channel."""
        self.unannounced: deque[Entry] = deque()
        """Adopted, and not announced yet."""
        self.releasing: dict[str, Hashable] = {}
        """Dropped here, and still lent to us on that channel."""
        self._number = 0

    # -- the borrower ----------------------------------------------------------------------------

    def adopt(self, object_id: str, owner: Address) -> Entry:
        """Return the entry for one more ref to another process's object."""
        entry = self._table.get(object_id)
        if entry is not None:
            entry.refs += 1
            return entry
        entry = self._table.create(object_id, owner)
        entry.channel = self.releasing.pop(object_id, None)
        if entry.channel is None:
            self.unannounced.append(entry)
        else:
            self.borrowed[entry.channel].add(entry)
        return entry

    def announce(self, channel: Hashable, entries: Iterable[Entry]) -> Borrow | None:
        """Return what tells their owner, at the end of ``channel``, that we hold these."""
        object_ids = []
        mine = self.borrowed.setdefault(channel, set())
        for entry in entries:
            if entry.channel is None and self._table.get(entry.object_id) is entry:
                entry.channel = channel
                mine.add(entry)
                object_ids.append(entry.object_id)
        if not object_ids:
            return None
        self._number += 1
        return Borrow(self._number, object_ids)

    def dropped(self, entries: Iterable[Entry]) -> list[Entry]:
        """One ref of each went away; return the entries that are freed (removed)."""
        freed = self._table.dropped(entries)
        for entry in freed:
            if entry.channel is not None:
                self.borrowed[entry.channel].discard(entry)
                self.releasing[entry.object_id] = entry.channel
        return freed

    def send_releases(self, object_ids: Iterable[str]) -> list[tuple[Hashable, ReleaseBorrow]]:
        """Return what tells the owners that these are not needed; those adopted anew stay."""
        by_channel: dict[Hashable, list[str]] = {}
        for object_id in object_ids:
            channel = self.releasing.pop(object_id, None)
            if channel is not None:
                by_channel.setdefault(channel, []).append(object_id)
        messages = []
        for channel, theirs in by_channel.items():
            self._number += 1
            messages.append((channel, ReleaseBorrow(theirs, self._number)))
        return messages

    def lender_lost(self, channel: Hashable) -> list[Entry]:
        """A channel ended; return what was borrowed on it: to be announced anew, or lost."""
        entries = self.borrowed.pop(channel, set())
        for entry in entries:
            entry.channel = None
        for object_id in [i for i, at in self.releasing.items() if at is channel]:
            del self.releasing[object_id]
        return sorted(entries, key=lambda e: e.object_id)

    # -- the owner -------------------------------------------------------------------------------

    def lend(self, channel: Hashable, message: Borrow) -> list[str]:
        """The process behind ``channel`` holds refs to these; return those that are gone already."""
        if not self._is_news(channel, message.number):
            return []
        theirs = self.lent.setdefault(channel, {})
        gone = []
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                gone.append(object_id)
            elif object_id not in theirs:
                theirs[object_id] = entry
                entry.borrowers += 1
        return gone

    def release(self, channel: Hashable, message: ReleaseBorrow) -> list[Entry]:
        """It holds no refs to these any more; return what is freed by that (removed)."""
        if not self._is_news(channel, message.number):
            return []
        theirs = self.lent.get(channel, {})
        returned = [e for i in message.object_ids if (e := theirs.pop(i, None)) is not None]
        return self._ended(channel, returned)

    def borrower_lost(self, channel: Hashable) -> list[Entry]:
        """A channel is gone for good, and all borrows on it; return what is freed by that (removed)."""
        self._last_number.pop(channel, None)
        return self._ended(channel, self.lent.pop(channel, {}).values())

    def _ended(self, channel: Hashable, returned: Iterable[Entry]) -> list[Entry]:
        freed = []
        for entry in returned:
            entry.borrowers -= 1
            if channel in entry.subscribers:
                entry.subscribers.remove(channel)
            if not entry.held and self._table.remove(entry):
                freed.append(entry)
        return freed

    def _is_news(self, channel: Hashable, number: int) -> bool:
        if number and number <= self._last_number.get(channel, 0):
            return False
        self._last_number[channel] = number or self._last_number.get(
            channel, 0
        )  # older peers do not number all
        return True
