"""The queue of one scheduling class's tasks that wait to be sent: round robin by fairness key.

It belongs to a :class:`~stoker.runtime.tasks.dispatch.ClassQueue`. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

QUANTUM_S = 0.001
"""How much work of one subqueue is sent before the next one's turn (one call, if it is longer)."""
LEASE_S = 0.02
"""How long it takes to get another lease: work that is done sooner is not worth one."""
_UNKNOWN_S = 1e6


class Dispatched(Protocol):
    """A call of a function whose length is measured as calls come back."""

    task_id: str

    @property
    def fairness_key(self) -> Hashable:
        """The key of the subqueue in which it waits: subqueues take turns, however long each is."""

    @property
    def exclusive(self) -> bool:
        """Whether it shares a worker with no other call: if the worker dies, this one is to blame."""

    @property
    def expected_s(self) -> float | None:
        """The time that calls of its function take, as measured; None before the first came back."""

    def record_duration(self, duration_s: float) -> None:
        """Note that it came back after ``duration_s`` of user code."""


T = TypeVar("T", bound=Dispatched)


def cost_s(task: Dispatched) -> float:
    """Return how long a call is expected to take; one of unknown length counts as endless."""
    expected_s = task.expected_s
    return _UNKNOWN_S if expected_s is None else expected_s


class ReadyQueue(Generic[T]):
    """The waiting tasks: each subqueue in its order, and subqueues in turns of ``QUANTUM_S`` of work.

    So a single call does not wait behind a hundred thousand of another function or thread.
    """

    __slots__ = ("_dropped", "_left_s", "_nwaiting", "_subqueues", "_turns")

    def __init__(self) -> None:
        self._subqueues: dict[Hashable, deque[T]] = {}
        self._turns: deque[deque[T]] = deque()
        """The subqueues that are not empty, the one whose turn it is first."""
        self._left_s = QUANTUM_S
        self._nwaiting = 0
        self._dropped: set[str] = set()

    def __len__(self) -> int:
        return self._nwaiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over the waiting tasks, one of each subqueue in turn."""
        subqueues = deque(iter(subqueue) for subqueue in self._turns)
        while subqueues:
            subqueue = subqueues.popleft()
            task = next(subqueue, None)
            if task is not None:
                subqueues.append(subqueue)
                if task.task_id not in self._dropped:
                    yield task

    def append(self, task: T) -> None:
        """Add ``task`` behind the others of its subqueue."""
        subqueue = self._subqueues.get(task.fairness_key)
        if subqueue is None:
            subqueue = self._subqueues[task.fairness_key] = deque()
            self._turns.append(subqueue)
        subqueue.append(task)
        self._nwaiting += 1

    def appendleft(self, task: T) -> None:
        """Add ``task`` in front of the others of its subqueue, which is next if it was empty."""
        subqueue = self._subqueues.get(task.fairness_key)
        if subqueue is None:
            subqueue = self._subqueues[task.fairness_key] = deque()
            self._turns.appendleft(subqueue)
            self._left_s = QUANTUM_S
        subqueue.appendleft(task)
        self._nwaiting += 1

    def first(self) -> T:
        """Return the next task."""
        return self._turns[0][0]

    def popleft(self) -> T:
        """Remove and return the next task."""
        subqueue = self._turns[0]
        task = subqueue.popleft()
        self._nwaiting -= 1
        self._left_s -= cost_s(task)
        if self._dropped:
            self._skip_dropped(subqueue)
        if not subqueue:
            self._remove(subqueue, task)
        elif self._left_s <= 0.0:
            self._turns.rotate(-1)
            self._left_s = QUANTUM_S
        return task

    def drop(self, task: T) -> None:
        """Forget a waiting task. It is skipped when its turn comes, so the cost is constant."""
        subqueue = self._subqueues[task.fairness_key]
        self._nwaiting -= 1
        self._dropped.add(task.task_id)
        self._skip_dropped(subqueue)
        if not subqueue:
            self._remove(subqueue, task)

    def _skip_dropped(self, subqueue: deque[T]) -> None:
        while subqueue and subqueue[0].task_id in self._dropped:
            self._dropped.remove(subqueue.popleft().task_id)

    def _remove(self, subqueue: deque[T], last: T) -> None:
        del self._subqueues[last.fairness_key]
        if self._turns[0] is subqueue:
            self._turns.popleft()
            self._left_s = QUANTUM_S
        else:
            self._turns.remove(subqueue)

    def leases_worth(self) -> float:
        """Return how many leases the waiting tasks would keep busy for ``LEASE_S``."""
        # The calls of one subqueue are of one function, so one stands for all.
        return sum(
            len(subqueue) * min(1.0, cost_s(subqueue[0]) / LEASE_S) for subqueue in self._turns
        )
