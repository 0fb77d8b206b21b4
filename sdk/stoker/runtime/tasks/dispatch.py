"""Dispatch of a scheduling class's waiting tasks to its leased workers: the caller's side of leases.

A :class:`ClassQueue` holds the ready tasks of one class and the :class:`Slot` of each lease that it
has. Work is pipelined by the measured length of each function's calls: those that take 20 us are
sent by the hundred, those that take a second (or are not measured yet) one at a time, so that a
long one never blocks others behind it; if one does all the same, those behind it are revoked
(``to_revoke``). Pure: time is a parameter, and what to send is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic

from stoker.runtime.tasks.ready_queue import ReadyQueue, T, cost_s

PIPELINE_S = 0.005
"""How much work may queue at a worker: this many seconds of the calls as measured."""
MAX_DEPTH = 256
STALE_S = 0.05
"""A call that is ahead of others for this long makes them worth revoking."""
REPORT_S = 1.0
"""A call that runs for this long is reported as running here too: a worker that is silent does not do so."""
MAX_LEASES_PER_REQUEST = 1000
_PAIR_S = 20 * PIPELINE_S
"""Two calls may be at a worker while they take less than this: the second hides the round trip."""


class Slot(Generic[T]):
    """A lease, and the calls at its worker, oldest first."""

    __slots__ = (
        "_costs",
        "busy_since_s",
        "channel",
        "closing",
        "inflight",
        "last_used_s",
        "lease_id",
        "load_s",
        "paused",
        "reported",
    )

    def __init__(self, lease_id: str, channel: object, now_s: float) -> None:
        self.lease_id = lease_id
        self.channel = channel
        self.inflight: dict[str, T] = {}
        self.load_s = 0.0
        """The expected length of all calls at the worker."""
        self.last_used_s = now_s
        self.busy_since_s = now_s
        self.closing = False
        self.paused = False
        """Whether its worker gave calls back because the one it runs takes long: none is sent behind it."""
        self.reported: T | None = None
        """The call that was reported as running, while it is here."""
        self._costs: dict[str, float] = {}

    def can_take(self, task: T) -> bool:
        """Return whether ``task`` may be sent now."""
        if self.closing or self.paused:
            return False
        if not self.inflight:
            return True
        if task.exclusive or next(iter(self.inflight.values())).exclusive:
            return False
        count, load_s = len(self.inflight), self.load_s + cost_s(task)
        return count < MAX_DEPTH and load_s <= (_PAIR_S if count == 1 else PIPELINE_S)

    def put(self, task: T, now_s: float) -> None:
        """Note that ``task`` is sent."""
        if not self.inflight:
            self.busy_since_s = now_s
        self.last_used_s = now_s
        self.inflight[task.task_id] = task
        self._costs[task.task_id] = cost = cost_s(task)
        self.load_s += cost

    def pop(self, task_id: str) -> T | None:
        """Note that a task is here no longer; return it, or None if it was not here."""
        task = self.inflight.pop(task_id, None)
        if task is not None:
            if task is self.reported:
                self.reported = None
            self.load_s -= self._costs.pop(task_id)
        if not self.inflight:
            self.load_s = 0.0  # else rounding errors would add up
        return task


class ClassQueue(Generic[T]):
    """The waiting tasks and the slots of one scheduling class.

    With ``spread`` each lease serves one call, so that the scheduler places every call. No more than
    ``max_slots`` leases are wanted at once.
    """

    def __init__(self, *, spread: bool = False, max_slots: int = 1 << 30) -> None:
        self._spread = spread
        self._max_slots = max_slots
        self.ready: ReadyQueue[T] = ReadyQueue()
        self.slots: dict[str, Slot[T]] = {}

    def add_slot(self, lease_id: str, channel: object, now_s: float) -> Slot[T]:
        """Add the slot of a lease that was granted; return it."""
        slot = self.slots[lease_id] = Slot[T](lease_id, channel, now_s)
        return slot

    def drop_slot(self, lease_id: str) -> list[T]:
        """Remove the slot of a lease that ended; return the calls at its worker, in the order of sending."""
        slot = self.slots.pop(lease_id, None)
        return list(slot.inflight.values()) if slot else []

    def dispatch(self, now_s: float) -> Iterator[tuple[Slot[T], list[T]]]:
        """Yield the batches to send, each with its slot. Fills the emptiest slots first, evenly."""
        ready = self.ready
        if len(ready) == 1:  # the usual case of calls that are waited for: no lists, no shares
            emptiest = None
            for slot in self.slots.values():
                if (emptiest is None or slot.load_s < emptiest.load_s) and slot.can_take(
                    ready.first()
                ):
                    emptiest = slot
            if emptiest is not None:
                yield emptiest, [self._take(emptiest, now_s)]
            return
        while ready:
            open_slots = [s for s in self.slots.values() if s.can_take(ready.first())]
            if not open_slots:
                return
            open_slots.sort(key=lambda s: s.load_s)
            share = max(1, -(-len(ready) // len(open_slots)))
            for slot in open_slots:
                batch: list[T] = []
                while ready and len(batch) < share and slot.can_take(ready.first()):
                    batch.append(self._take(slot, now_s))
                if batch:
                    yield slot, batch

    def _take(self, slot: Slot[T], now_s: float) -> T:
        """Move the next task to a slot."""
        task = self.ready.popleft()
        slot.put(task, now_s)
        slot.closing = slot.closing or self._spread
        return task

    def complete(self, slot: Slot[T], task_id: str, duration_s: float, now_s: float) -> T | None:
        """Handle the end of a call; return it, or None if it was no longer there."""
        task = slot.pop(task_id)
        if task is not None:
            task.record_duration(duration_s)
        slot.paused = False
        slot.last_used_s = slot.busy_since_s = now_s
        return task

    def return_unstarted(self, slot: Slot[T], task_ids: list[str]) -> list[T]:
        """Put calls that a worker gave back unstarted at the front again, in their order; return them."""
        tasks = [t for i in task_ids if (t := slot.pop(i)) is not None]
        for task in reversed(tasks):
            self.ready.appendleft(task)
        slot.paused = bool(slot.inflight)
        return tasks

    def to_revoke(self, now_s: float) -> Iterator[tuple[Slot[T], list[str]]]:
        """Yield the calls that wait behind a slow one, by slot: they may run elsewhere."""
        for slot in self.slots.values():
            if len(slot.inflight) > 1 and now_s - slot.busy_since_s > STALE_S:
                yield slot, list(slot.inflight)[1:]

    def long_running(self, now_s: float) -> Iterator[tuple[T, float]]:
        """Yield each call that runs for ``REPORT_S`` or more, once, and for how long it does."""
        for slot in self.slots.values():
            if slot.inflight and slot.reported is None and now_s - slot.busy_since_s >= REPORT_S:
                slot.reported = next(iter(slot.inflight.values()))
                yield slot.reported, now_s - slot.busy_since_s

    def idle_slots(self, now_s: float, grace_s: float) -> list[Slot[T]]:
        """Return the slots that were not used for ``grace_s``."""
        if self.ready:
            return []
        return [
            s for s in self.slots.values() if not s.inflight and now_s - s.last_used_s >= grace_s
        ]

    @property
    def leases_wanted(self) -> int:
        """The number of further leases that would help: one per waiting task, fewer where tasks are short."""
        waiting = min(len(self.ready), self._max_slots - len(self.slots))
        if waiting <= 0:
            return 0
        if self._spread:
            return min(waiting, MAX_LEASES_PER_REQUEST)
        # At least one: a call that was cancelled by force counts as having taken no time.
        return min(max(1, math.ceil(self.ready.leases_worth())), waiting, MAX_LEASES_PER_REQUEST)
