"""Borrowing, without the sending: what this process lent on which line, and what it borrowed.

The owner of an object keeps it while it is lent. What is lent is bound to the line on which it was
asked for, so a borrower with two lines, or with a new one after a cut, is counted right. Messages of
one line arrive in order; each has a number, so that one which comes twice is done once.

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


class Loans:
    """Both halves of borrowing, for one process."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self.lent: dict[Hashable, dict[str, Entry]] = {}
        """As owner: what is lent on each line."""
        self._heard: dict[Hashable, int] = {}
        self.borrowed: dict[Hashable, set[Entry]] = {}
        """As borrower: what is announced on each line."""
        self.fresh: deque[Entry] = deque()
        """Adopted, and not announced yet."""
        self.returning: dict[str, Hashable] = {}
        """Dropped here, and still lent to us on that line."""
        self._number = 0

    # -- the borrower ----------------------------------------------------------------------------

    def adopt(self, object_id: str, owner: Address) -> Entry:
        """Return the entry for one more ref to another process's object."""
        entry = self._table.get(object_id)
        if entry is not None:
            entry.refs += 1
            return entry
        entry = self._table.create(object_id, owner)
        entry.line = self.returning.pop(object_id, None)
        if entry.line is None:
            self.fresh.append(entry)
        else:
            self.borrowed[entry.line].add(entry)
        return entry

    def announce(self, line: Hashable, entries: Iterable[Entry]) -> Borrow | None:
        """Return what tells their owner, at the end of ``line``, that we hold these."""
        object_ids = []
        mine = self.borrowed.setdefault(line, set())
        for entry in entries:
            if entry.line is None and self._table.get(entry.object_id) is entry:
                entry.line = line
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
            if entry.line is not None:
                self.borrowed[entry.line].discard(entry)
                self.returning[entry.object_id] = entry.line
        return freed

    def give_back(self, object_ids: Iterable[str]) -> list[tuple[Hashable, ReleaseBorrow]]:
        """Return what tells the owners that these are not needed; those adopted anew stay."""
        by_line: dict[Hashable, list[str]] = {}
        for object_id in object_ids:
            line = self.returning.pop(object_id, None)
            if line is not None:
                by_line.setdefault(line, []).append(object_id)
        messages = []
        for line, theirs in by_line.items():
            self._number += 1
            messages.append((line, ReleaseBorrow(theirs, self._number)))
        return messages

    def lender_lost(self, line: Hashable) -> list[Entry]:
        """A line ended; return what was borrowed on it: to be announced anew, or lost."""
        entries = self.borrowed.pop(line, set())
        for entry in entries:
            entry.line = None
        for object_id in [i for i, at in self.returning.items() if at is line]:
            del self.returning[object_id]
        return sorted(entries, key=lambda e: e.object_id)

    # -- the owner -------------------------------------------------------------------------------

    def lend(self, line: Hashable, message: Borrow) -> list[str]:
        """The process behind ``line`` holds refs to these; return those that are gone already."""
        if not self._is_news(line, message.number):
            return []
        theirs = self.lent.setdefault(line, {})
        gone = []
        for object_id in message.object_ids:
            entry = self._table.get(object_id)
            if entry is None:
                gone.append(object_id)
            elif object_id not in theirs:
                theirs[object_id] = entry
                entry.borrowers += 1
        return gone

    def take_back(self, line: Hashable, message: ReleaseBorrow) -> list[Entry]:
        """It holds no refs to these any more; return what is freed by that (removed)."""
        if not self._is_news(line, message.number):
            return []
        theirs = self.lent.get(line, {})
        returned = [e for i in message.object_ids if (e := theirs.pop(i, None)) is not None]
        return self._ended(line, returned)

    def borrower_lost(self, line: Hashable) -> list[Entry]:
        """A line is gone for good, and all loans on it; return what is freed by that (removed)."""
        self._heard.pop(line, None)
        return self._ended(line, self.lent.pop(line, {}).values())

    def _ended(self, line: Hashable, returned: Iterable[Entry]) -> list[Entry]:
        freed = []
        for entry in returned:
            entry.borrowers -= 1
            if line in entry.subscribers:
                entry.subscribers.remove(line)
            if not entry.held and self._table.remove(entry):
                freed.append(entry)
        return freed

    def _is_news(self, line: Hashable, number: int) -> bool:
        if number and number <= self._heard.get(line, 0):
            return False
        self._heard[line] = number or self._heard.get(line, 0)  # older peers do not number all
        return True
