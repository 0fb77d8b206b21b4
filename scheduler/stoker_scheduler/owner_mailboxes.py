"""Orders to owners (leases preempted, leases lost) that no poll of theirs has carried yet.

Filled by the engine as it carries out commands, emptied by the owners' long polls. Kept in memory only:
what a new leader does not know, an owner learns from its next poll, which names its leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

MAILBOX_LIFE_S = 60.0
MAX_UNREAD_MAILBOXES = 1024
"""With more of them, those that nobody has polled for ``MAILBOX_LIFE_S`` go."""


@dataclass(slots=True)
class Mailbox:
    """The undelivered orders of one owner."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    preempted: dict[str, None] = field(default_factory=dict)
    lost: dict[str, None] = field(default_factory=dict)
    read_at_s: float = 0.0
    number: int = 0
    """That of the newest list of its leases."""

    async def wait(self, lease_ids: Collection[str], timeout_s: float) -> None:
        """Wait for a new order, unless one is there for a poll that names ``lease_ids``."""
        # A preemption may be of a lease that the poll of that moment did not name yet.
        if not self.preempted.keys().isdisjoint(lease_ids) or timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            pass


class OwnerMailboxes:
    """One mailbox per owner."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}

    def of(self, owner_id: str) -> Mailbox:
        """Return the owner's mailbox, made if it has none."""
        return self._boxes.setdefault(owner_id, Mailbox())

    def preempt(self, owner_id: str, lease_ids: tuple[str, ...]) -> None:
        """Order an owner to give leases back."""
        box = self.of(owner_id)
        box.preempted.update(dict.fromkeys(lease_ids))
        box.changed.set()

    def lose(self, owner_id: str, lease_ids: tuple[str, ...]) -> None:
        """Notify an owner that leases are gone."""
        box = self.of(owner_id)
        box.lost.update(dict.fromkeys(lease_ids))
        box.changed.set()

    def wake_all(self) -> None:
        """End the wait of every poll."""
        for box in self._boxes.values():
            box.changed.set()

    def drop_unread(self, now_s: float) -> None:
        """Bound the mailboxes: drop those of owners that no longer poll."""
        if len(self._boxes) >= MAX_UNREAD_MAILBOXES:
            oldest_s = now_s - MAILBOX_LIFE_S
            self._boxes = {o: box for o, box in self._boxes.items() if box.read_at_s >= oldest_s}
