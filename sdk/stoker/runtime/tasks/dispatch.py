"""Which leased worker runs which waiting task of a scheduling class: the caller's side of leases.

A :class:`ClassQueue` holds the ready tasks of one class and the :class:`Slot` of each lease that it
has. Work is pipelined by the measured length of each function's calls: those that take 20 us are
sent by the hundred, those that take a second (or are not measured yet) one at a time, so that a
long one never hides others behind it; if one does all the same, the tail behind it is taken back
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
"""A call that is ahead of others for this long makes them worth taking back."""
MAX_LEASES_PER_ASK = 1000
_PAIR_S = 20 * PIPELINE_S
"""Two calls may be at a worker while they take less than this: the second hides the way back."""


class Slot(Generic[T]):
    """One lease and what was sent to its worker, oldest first."""

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
    )

    def __init__(self, lease_id: str, channel: object, now_s: float) -> None:
        self.lease_id = lease_id
        self.channel = channel
        self.inflight: dict[str, T] = {}
        self.load_s = 0.0
        """Expected length of all that is at the worker."""
        self.last_used_s = now_s
        self.busy_since_s = now_s
        self.closing = False
        self.paused = False
        """Its worker gave calls back because the one it runs takes long: send no more behind it."""
        self._costs: dict[str, float] = {}

    def takes(self, task: T) -> bool:
        """Whether ``task`` may be sent now."""
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
        """Note that a task is here no longer; return it if it was."""
        task = self.inflight.pop(task_id, None)
        if task is not None:
            self.load_s -= self._costs.pop(task_id)
        if not self.inflight:
            self.load_s = 0.0  # leave no rounding behind
        return task


class ClassQueue(Generic[T]):
    """The waiting tasks and the slots of one scheduling class.

    With ``spread`` each lease serves one call, so that each call goes where the scheduler says.
    """

    def __init__(self, *, spread: bool = False) -> None:
        self._spread = spread
        self.ready: ReadyQueue[T] = ReadyQueue()
        self.slots: dict[str, Slot[T]] = {}

    def add_slot(self, lease_id: str, channel: object, now_s: float) -> Slot[T]:
        """A lease was granted."""
        slot = self.slots[lease_id] = Slot[T](lease_id, channel, now_s)
        return slot

    def drop_slot(self, lease_id: str) -> list[T]:
        """A lease ended; return what its worker had, in the order in which it was sent."""
        slot = self.slots.pop(lease_id, None)
        return list(slot.inflight.values()) if slot else []

    def pump(self, now_s: float) -> Iterator[tuple[Slot[T], list[T]]]:
        """Yield what to send to whom. Fills the emptiest slots first, evenly."""
        ready = self.ready
        while ready:
            open_slots = [s for s in self.slots.values() if s.takes(ready.first())]
            if not open_slots:
                return
            open_slots.sort(key=lambda s: s.load_s)
            share = max(1, -(-len(ready) // len(open_slots)))
            for slot in open_slots:
                batch: list[T] = []
                while ready and len(batch) < share and slot.takes(ready.first()):
                    task = ready.popleft()
                    slot.put(task, now_s)
                    slot.closing = slot.closing or self._spread
                    batch.append(task)
                if batch:
                    yield slot, batch

    def finished(self, slot: Slot[T], task_id: str, duration_s: float, now_s: float) -> T | None:
        """A call came back; return it, or None if it was no longer there."""
        task = slot.pop(task_id)
        if task is not None:
            task.record_duration(duration_s)
        slot.paused = False
        slot.last_used_s = slot.busy_since_s = now_s
        return task

    def taken_back(self, slot: Slot[T], task_ids: list[str]) -> list[T]:
        """The worker gave these back unstarted: they wait again, at the front, in their order."""
        tasks = [t for i in task_ids if (t := slot.pop(i)) is not None]
        for task in reversed(tasks):
            self.ready.appendleft(task)
        slot.paused = bool(slot.inflight)
        return tasks

    def to_revoke(self, now_s: float) -> Iterator[tuple[Slot[T], list[str]]]:
        """Yield the calls that wait behind a slow one: they may run elsewhere."""
        for slot in self.slots.values():
            if len(slot.inflight) > 1 and now_s - slot.busy_since_s > STALE_S:
                yield slot, list(slot.inflight)[1:]

    def idle_slots(self, now_s: float, grace_s: float) -> list[Slot[T]]:
        """Return the slots that nothing has used for ``grace_s``."""
        if self.ready:
            return []
        return [
            s for s in self.slots.values() if not s.inflight and now_s - s.last_used_s >= grace_s
        ]

    @property
    def wanted(self) -> int:
        """How many more leases would help: one per waiting task, fewer where tasks are short."""
        waiting = len(self.ready)
        if not waiting:
            return 0
        if self._spread:
            return min(waiting, MAX_LEASES_PER_ASK)
        # At least one: a call that was cancelled by force counts as having taken no time.
        return min(max(1, math.ceil(self.ready.leases_worth())), waiting, MAX_LEASES_PER_ASK)
