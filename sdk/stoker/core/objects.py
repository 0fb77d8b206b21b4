"""The object table of one runtime: what each object is, who waits for it, and who keeps it alive.

An entry lives while this process holds an ``ObjectRef`` to it or, for an object it owns, while
another process has borrowed it. Values that contain refs keep those refs alive (``children``).
Pure: the shell in :mod:`stoker.runtime.objects` does the messages, and guards settling by a lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from stoker_wire.messages.data import Place, Stored

if TYPE_CHECKING:
    import weakref

    from stoker_wire.messages.common import Address


class Waiter(Protocol):
    """Somebody who wants to know that an entry is settled."""

    def settled(self) -> None:
        """One of the entries waited for has its place now."""


class Entry:
    """What this process knows of one object. ``owner`` is None where this process owns it."""

    __slots__ = (
        "borrowers",
        "cached",
        "children",
        "object_id",
        "owner",
        "place",
        "ref",
        "subscribers",
        "task",
        "waiters",
    )

    def __init__(self, object_id: str, owner: Address | None = None) -> None:
        self.object_id = object_id
        self.owner = owner
        self.place: Place | None = None
        self.ref: weakref.ref[Any] | None = None
        self.task: Any = None
        """The pending task that will make it, if this process submitted one."""
        self.children: tuple[Any, ...] = ()
        """ObjectRefs inside the value: held while this entry lives."""
        self.waiters: list[Waiter] = []
        self.subscribers: list[Any] = []
        """Lines of other runtimes that asked where the object is."""
        self.borrowers: dict[Hashable, Any] = {}
        self.cached: Any = None
        """A value that pickle need not make again (only immutable ones are kept)."""

    @property
    def held(self) -> bool:
        """Whether anything keeps this entry alive."""
        return bool(self.borrowers) or (self.ref is not None and self.ref() is not None)


class ObjectTable:
    """All entries of one runtime, by object id."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def create(self, object_id: str, owner: Address | None = None) -> Entry:
        """Return a new entry; the caller gives it a ref at once."""
        entry = self.entries[object_id] = Entry(object_id, owner)
        return entry

    def get(self, object_id: str) -> Entry | None:
        """Return the entry, or None where it is unknown or freed."""
        return self.entries.get(object_id)

    def settle(self, entry: Entry, place: Place) -> tuple[list[Waiter], list[Any]]:
        """Give an entry its place; return who must be told. A settled entry stays as it is."""
        if entry.place is not None:
            return [], []
        entry.place = place
        entry.task = None
        waiters, entry.waiters = entry.waiters, []
        subscribers, entry.subscribers = entry.subscribers, []
        return waiters, subscribers

    def borrow(self, object_ids: Iterable[str], borrower: Hashable) -> list[str]:
        """Note that ``borrower`` holds refs to these; return those that are gone already."""
        gone = []
        for object_id in object_ids:
            entry = self.entries.get(object_id)
            if entry is None:
                gone.append(object_id)
            else:
                # The strong ref is kept with the borrower: the entry lives as long as it does.
                entry.borrowers[borrower] = None
        return gone

    def unborrow(self, object_ids: Iterable[str], borrower: Hashable) -> list[Entry]:
        """Forget a borrower of these; return the entries that nobody holds now (removed)."""
        freed = []
        for object_id in object_ids:
            entry = self.entries.get(object_id)
            if entry is not None and borrower in entry.borrowers:
                del entry.borrowers[borrower]
                if not entry.held:
                    del self.entries[object_id]
                    freed.append(entry)
        return freed

    def borrower_gone(self, borrower: Hashable) -> list[Entry]:
        """A borrower's line ended: forget it everywhere; return the entries freed by that."""
        theirs = [e.object_id for e in self.entries.values() if borrower in e.borrowers]
        return self.unborrow(theirs, borrower)

    def dropped(self, entries: Iterable[Entry]) -> list[Entry]:
        """The last local refs of these went away; return the entries that are freed (removed)."""
        freed = []
        for entry in entries:
            if not entry.held and self.entries.get(entry.object_id) is entry:
                del self.entries[entry.object_id]
                freed.append(entry)
        return freed

    def stored_here(self, node_id: str) -> list[Entry]:
        """Return the owned entries whose bytes lie in the arena of ``node_id``."""
        return [
            e
            for e in self.entries.values()
            if e.owner is None and isinstance(e.place, Stored) and e.place.node_id == node_id
        ]
