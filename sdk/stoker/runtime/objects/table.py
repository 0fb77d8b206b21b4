"""The object table of one runtime: the location, the waiters and the reference counts of each object.

An entry lives while this process holds an ``ObjectRef`` to it or, for an object it owns, while
another process has borrowed it. Values that contain refs keep those refs alive (``children``).
Refs are counted, and not looked up through weak references: those still answer while the last ref
is being finalized, and an entry taken for alive at that moment would stay for ever.
Pure: the shell in :mod:`stoker.runtime.objects.store` does the messages, and guards settling by a lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Location


class Waiter(Protocol):
    """A party that is notified when an entry is settled."""

    def settled(self, location: Location | None = None, /) -> None:
        """Note that one of the entries waited for has its location now."""


class Producer(Protocol):
    """An unsettled call of this process that will make an object."""

    task_id: str
    channel: Any
    """The channel on which its results come, once it was sent."""

    @property
    def name(self) -> str:
        """The call's name for people."""

    def describe(self) -> str:
        """Return what the call waits for, in words."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """The state of one object in this process. ``owner`` is None where this process owns it.

    There may be a million of them, so the garbage collector does not visit them. Their one cycle, with
    the task that will make the object, ends when that is settled.
    """

    object_id: str
    owner: Address | None = None
    location: Location | None = None
    refs: int = 1
    """How many ObjectRefs of this process there are; the creator of an entry makes the first one."""
    borrowers: int = 0
    """How many channels it is lent on."""
    channel: Hashable | None = None
    """The channel on which it is borrowed."""
    task: Producer | None = None
    """The pending task that will make it, if this process submitted one."""
    resolve_requested: bool = False
    """Whether its owner was asked where it is."""
    children: tuple[Any, ...] = ()
    """ObjectRefs inside the value: held while this entry lives."""
    _waiters: list[Waiter] | None = None
    _subscribers: list[Any] | None = None

    @property
    def waiters(self) -> list[Waiter]:
        """Parties of this process that wait for it."""
        if self._waiters is None:
            self._waiters = []
        return self._waiters

    @property
    def subscribers(self) -> list[Any]:
        """Channels to other processes that asked where it is."""
        if self._subscribers is None:
            self._subscribers = []
        return self._subscribers

    @property
    def is_referenced(self) -> bool:
        """Whether anything keeps this entry alive."""
        return self.refs > 0 or self.borrowers > 0


def describe_wait(entries: Sequence[Entry]) -> str:
    """Return what unsettled objects wait for (at most three of them), a line each."""
    lines = [_describe(entry) for entry in entries[:3]]
    more = [f"and {len(entries) - 3} more"] if len(entries) > 3 else []
    return "\n".join((*lines, *more))


def _describe(entry: Entry) -> str:
    task = entry.task
    if task is not None:
        return f"{entry.object_id} of {task.name} ({task.task_id}): {task.describe()}"
    owner = entry.owner
    return f"{entry.object_id}: its owner {owner.peer_id if owner else 'here'} has not made it yet"


class ObjectTable:
    """All entries of one runtime, by object id."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def create(self, object_id: str, owner: Address | None = None) -> Entry:
        """Return a new entry that counts one ref, which the caller makes at once."""
        entry = self.entries[object_id] = Entry(object_id, owner)
        return entry

    def get(self, object_id: str) -> Entry | None:
        """Return the entry, or None where it is unknown or freed."""
        return self.entries.get(object_id)

    def settle(self, entry: Entry, location: Location) -> tuple[list[Waiter], list[Any]]:
        """Give an entry its location; return its waiters and subscribers. A settled one stays as it is."""
        if entry.location is not None:
            return [], []
        entry.location = location
        entry.task = None
        waiters, entry._waiters = entry._waiters or [], None
        subscribers, entry._subscribers = entry._subscribers or [], None
        return waiters, subscribers

    def drop_refs(self, entries: Iterable[Entry]) -> list[Entry]:
        """Drop one ref of each; return the entries that nobody holds now (removed)."""
        freed = []
        for entry in entries:
            entry.refs -= 1
            if not entry.refs and not entry.borrowers and self.remove(entry):
                freed.append(entry)
        return freed

    def remove(self, entry: Entry) -> bool:
        """Remove an entry; return False if it is not in the table (any more)."""
        if self.entries.get(entry.object_id) is not entry:
            return False
        del self.entries[entry.object_id]
        return True
