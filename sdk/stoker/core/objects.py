"""The object table of one runtime: what each object is, who waits for it, and who keeps it alive.

An entry lives while this process holds an ``ObjectRef`` to it or, for an object it owns, while
another process has borrowed it. Values that contain refs keep those refs alive (``children``).
Refs are counted, and not looked up through weak references: those still answer while the last ref
is being finalized, and an entry taken for alive at that moment would stay for ever.
Pure: the shell in :mod:`stoker.runtime.objects` does the messages, and guards settling by a lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from stoker_wire.messages.common import Address
    from stoker_wire.messages.data import Place


class Waiter(Protocol):
    """Somebody who wants to know that an entry is settled."""

    def settled(self) -> None:
        """One of the entries waited for has its place now."""


class Entry:
    """What this process knows of one object. ``owner`` is None where this process owns it."""

    __slots__ = (
        "borrowers",
        "children",
        "line",
        "object_id",
        "owner",
        "place",
        "refs",
        "subscribers",
        "task",
        "waiters",
    )

    def __init__(self, object_id: str, owner: Address | None = None) -> None:
        self.object_id = object_id
        self.owner = owner
        self.place: Place | None = None
        self.refs = 1
        """ObjectRefs of this process; whoever makes an entry makes its first one."""
        self.borrowers = 0
        """Lines on which the object is lent."""
        self.line: Hashable | None = None
        """The line on which it is borrowed."""
        self.task: Any = None
        """The pending task that will make it, if this process submitted one."""
        self.children: tuple[Any, ...] = ()
        """ObjectRefs inside the value: held while this entry lives."""
        self.waiters: list[Waiter] = []
        self.subscribers: list[Any] = []
        """Lines of other runtimes that asked where the object is."""

    @property
    def held(self) -> bool:
        """Whether anything keeps this entry alive."""
        return self.refs > 0 or self.borrowers > 0


class ObjectTable:
    """All entries of one runtime, by object id."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def create(self, object_id: str, owner: Address | None = None) -> Entry:
        """Return a new entry with one ref, which the caller makes at once."""
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

    def dropped(self, entries: Iterable[Entry]) -> list[Entry]:
        """One ref of each went away; return the entries that nobody holds now (removed)."""
        freed = []
        for entry in entries:
            entry.refs -= 1
            if not entry.refs and not entry.borrowers and self.remove(entry):
                freed.append(entry)
        return freed

    def remove(self, entry: Entry) -> bool:
        """Take an entry out; False if it is not in (any more)."""
        if self.entries.get(entry.object_id) is not entry:
            return False
        del self.entries[entry.object_id]
        return True
