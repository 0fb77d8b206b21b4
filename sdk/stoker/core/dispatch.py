"""Which leased worker runs which waiting task of a scheduling class: the caller's side of leases.

A :class:`ClassQueue` holds the ready tasks of one class and the :class:`Slot` of each lease that it
has. Work is pipelined to a depth that the measured length of the tasks allows: calls that take
20 us are sent by the hundred, calls that take a second one at a time, so that a long one never
hides others behind it; if one does all the same, the tail behind it is taken back (``to_revoke``).
Pure: time is a parameter, and what to send is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

PIPELINE_S = 0.005
"""How much work may queue at a worker: this many seconds of the calls as measured."""
MAX_DEPTH = 256
STALE_S = 0.05
"""A call that is ahead of others for this long makes them worth taking back."""
MAX_LEASES_PER_ASK = 1000
_SMOOTHING = 0.2


class Dispatched(Protocol):
    """What is dispatched: anything with a task id."""

    task_id: str

    @property
    def alone(self) -> bool:
        """Whether it shares a worker with no other call: if that worker dies, it was this one."""


T = TypeVar("T", bound=Dispatched)


class Slot(Generic[T]):
    """One lease and what was sent to its worker, oldest first."""

    __slots__ = (
        "busy_since_s",
        "closing",
        "inflight",
        "last_used_s",
        "lease_id",
        "line",
        "mean_s",
        "paused",
    )

    def __init__(self, lease_id: str, line: object, now_s: float) -> None:
        self.lease_id = lease_id
        self.line = line
        self.inflight: dict[str, T] = {}
        self.mean_s: float | None = None
        self.last_used_s = now_s
        self.busy_since_s = now_s
        self.closing = False
        self.paused = False
        """Its worker gave calls back because the one it runs takes long: send no more behind it."""

    @property
    def depth(self) -> int:
        """How many calls may be at the worker at once."""
        if self.mean_s is None or self.mean_s > 10 * PIPELINE_S:
            return 1
        return max(2, min(MAX_DEPTH, int(PIPELINE_S / max(self.mean_s, 1e-6))))

    def room_for(self, task: T) -> int:
        """How many calls may be sent, if ``task`` is the first of them."""
        if self.closing or self.paused:
            return 0
        if not self.inflight:
            return 1 if task.alone else self.depth
        if task.alone or next(iter(self.inflight.values())).alone:
            return 0
        return max(0, self.depth - len(self.inflight))


class ClassQueue(Generic[T]):
    """The waiting tasks and the slots of one scheduling class."""

    def __init__(self) -> None:
        self.ready: deque[T] = deque()
        self.slots: dict[str, Slot[T]] = {}
        self.mean_s: float | None = None

    def add_slot(self, lease_id: str, line: object, now_s: float) -> Slot[T]:
        """A lease was granted."""
        slot = self.slots[lease_id] = Slot[T](lease_id, line, now_s)
        slot.mean_s = self.mean_s
        return slot

    def drop_slot(self, lease_id: str) -> list[T]:
        """A lease ended; return what its worker had, in the order in which it was sent."""
        slot = self.slots.pop(lease_id, None)
        return list(slot.inflight.values()) if slot else []

    def pump(self, now_s: float) -> Iterator[tuple[Slot[T], list[T]]]:
        """Yield what to send to whom. Fills the emptiest slots first, evenly."""
        ready = self.ready
        while ready:
            open_slots = [s for s in self.slots.values() if s.room_for(ready[0])]
            if not open_slots:
                return
            open_slots.sort(key=lambda s: len(s.inflight))
            share = max(1, -(-len(ready) // len(open_slots)))
            for slot in open_slots:
                room = min(share, slot.room_for(ready[0])) if ready else 0
                batch: list[T] = []
                while ready and len(batch) < room and not (batch and ready[0].alone):
                    batch.append(ready.popleft())
                if not batch:
                    continue
                if not slot.inflight:
                    slot.busy_since_s = now_s
                for task in batch:
                    slot.inflight[task.task_id] = task
                slot.last_used_s = now_s
                yield slot, batch

    def finished(self, slot: Slot[T], task_id: str, duration_s: float, now_s: float) -> T | None:
        """A call came back; return it, or None if it was no longer there."""
        task = slot.inflight.pop(task_id, None)
        mean = slot.mean_s
        slot.mean_s = duration_s if mean is None else mean + _SMOOTHING * (duration_s - mean)
        self.mean_s = slot.mean_s
        slot.paused = False
        slot.last_used_s = slot.busy_since_s = now_s
        return task

    def taken_back(self, slot: Slot[T], task_ids: list[str]) -> list[T]:
        """The worker gave these back unstarted: they wait again, at the front, in their order."""
        tasks = [t for i in task_ids if (t := slot.inflight.pop(i, None)) is not None]
        self.ready.extendleft(reversed(tasks))
        slot.paused = bool(slot.inflight)
        return tasks

    def to_revoke(self, now_s: float) -> Iterator[tuple[Slot[T], list[str]]]:
        """Yield the calls that wait behind a slow one while another slot has nothing to do."""
        if self.ready:
            return
        idle = sum(1 for s in self.slots.values() if not s.inflight and not s.closing)
        for slot in self.slots.values():
            if idle and len(slot.inflight) > 1 and now_s - slot.busy_since_s > STALE_S:
                idle -= 1
                waiting = list(slot.inflight)[1:]
                yield slot, waiting

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
        if self.mean_s is not None:
            # A worker serves this many of them in the time that it takes to get another lease.
            waiting = -(-waiting // max(1, int(4 * PIPELINE_S / max(self.mean_s, 1e-6))))
            waiting = max(waiting, 0 if self.slots else 1)
        return min(waiting, MAX_LEASES_PER_ASK)
