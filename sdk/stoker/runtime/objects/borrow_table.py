"""The reference counts between processes: the objects that this one lent, and those that it borrowed.

The owner of an object keeps it while it is lent. A borrow is bound to the channel on which it was
announced, so a borrower with two channels, or with a new one after a cut, is counted right. Messages of
one channel arrive in order; each has a number, so that one which comes twice is applied once.

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
    """The borrows of one process, as owner and as borrower."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self.lent_by_channel: dict[Hashable, dict[str, Entry]] = {}
        """As owner: the objects lent on each channel, by id."""
        self._last_number: dict[Hashable, int] = {}
        self.borrowed_by_channel: dict[Hashable, set[Entry]] = {}
        """As borrower: the objects announced on each channel."""
        self.unannounced: deque[Entry] = deque()
        """As borrower: borrowed, and not announced yet."""
        self.releasing: dict[str, Hashable] = {}
        """As borrower: dropped here, and still lent to this process on that channel."""
        self._number = 0

    # -- the borrower ----------------------------------------------------------------------------

    def borrow(self, object_id: str, owner: Address) -> Entry:
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
            self.borrowed_by_channel[entry.channel].add(entry)
        return entry

    def announce(self, channel: Hashable, entries: Iterable[Entry]) -> Borrow | None:
        """Return the message for the owner at the end of ``channel`` that this process holds these."""
        object_ids = []
        borrowed = self.borrowed_by_channel.setdefault(channel, set())
        for entry in entries:
            if entry.channel is None and self._table.get(entry.object_id) is entry:
                entry.channel = channel
                borrowed.add(entry)
                object_ids.append(entry.object_id)
        if not object_ids:
            return None
        self._number += 1
        return Borrow(self._number, object_ids)

    def drop_refs(self, entries: Iterable[Entry]) -> list[Entry]:
        """Drop one ref of each; return the entries that are freed by that (removed)."""
        freed = self._table.drop_refs(entries)
        for entry in freed:
            if entry.channel is not None:
                self.borrowed_by_channel[entry.channel].discard(entry)
                self.releasing[entry.object_id] = entry.channel
        return freed

    def take_releases(self, object_ids: Iterable[str]) -> list[tuple[Hashable, ReleaseBorrow]]:
        """Return the messages for the owners that these are released, except those borrowed anew."""
        by_channel: dict[Hashable, list[str]] = {}
        for object_id in object_ids:
            channel = self.releasing.pop(object_id, None)
            if channel is not None:
                by_channel.setdefault(channel, []).append(object_id)
        messages = []
        for channel, dropped in by_channel.items():
            self._number += 1
            messages.append((channel, ReleaseBorrow(dropped, self._number)))
        return messages

    def drop_lender(self, channel: Hashable) -> list[Entry]:
        """Forget a channel to an owner; return what was borrowed on it: to be announced anew, or lost."""
        entries = self.borrowed_by_channel.pop(channel, set())
        for entry in entries:
            entry.channel = None
        for object_id in [i for i, at in self.releasing.items() if at is channel]:
            del self.releasing[object_id]
        return sorted(entries, key=lambda e: e.object_id)

    # -- the owner -------------------------------------------------------------------------------

    def lend(self, channel: Hashable, message: Borrow) -> list[str]:
        """Lend these to the process behind ``channel``; return those that are gone already."""
        if not self._is_new(channel, message.number):
            return []
        lent = self.lent_by_channel.setdefault(channel, {})
        gone = []
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                gone.append(object_id)
            elif object_id not in lent:
                lent[object_id] = entry
                entry.borrowers += 1
        return gone

    def release(self, channel: Hashable, message: ReleaseBorrow) -> list[Entry]:
        """End the borrows of the process behind ``channel``; return what is freed by that (removed)."""
        if not self._is_new(channel, message.number):
            return []
        lent = self.lent_by_channel.get(channel, {})
        returned = [e for i in message.object_ids if (e := lent.pop(i, None)) is not None]
        return self._end_borrows(channel, returned)

    def drop_borrower(self, channel: Hashable) -> list[Entry]:
        """End all borrows on a channel that is gone for good; return what is freed by that (removed)."""
        self._last_number.pop(channel, None)
        return self._end_borrows(channel, self.lent_by_channel.pop(channel, {}).values())

    def _end_borrows(self, channel: Hashable, returned: Iterable[Entry]) -> list[Entry]:
        freed = []
        for entry in returned:
            entry.borrowers -= 1
            if channel in entry.subscribers:
                entry.subscribers.remove(channel)
            if not entry.is_referenced and self._table.remove(entry):
                freed.append(entry)
        return freed

    def _is_new(self, channel: Hashable, number: int) -> bool:
        if number and number <= self._last_number.get(channel, 0):
            return False
        # Older peers do not number all messages.
        self._last_number[channel] = number or self._last_number.get(channel, 0)
        return True
