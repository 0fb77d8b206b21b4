"""The tasks of one scheduling class that wait to be sent: in turns, so that none waits for all.

Used by :mod:`stoker.runtime.tasks.dispatch`. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

QUANTUM_S = 0.001
"""How much work of one flow is sent before the next one's turn (one call, if it is longer)."""
LEASE_S = 0.02
"""What another lease takes to get: work that is done sooner is not worth one."""
_UNKNOWN_S = 1e6


class Dispatched(Protocol):
    """What is dispatched: a call of a function whose length is learned as calls come back."""

    task_id: str

    @property
    def flow(self) -> Hashable:
        """Whose call it is: flows take turns, whatever waits in each."""

    @property
    def exclusive(self) -> bool:
        """Whether it shares a worker with no other call: if that worker dies, it was this one."""

    @property
    def expected_s(self) -> float | None:
        """How long calls of its function take, as measured; None before the first came back."""

    def record_duration(self, duration_s: float) -> None:
        """It came back after ``duration_s`` of user code."""


T = TypeVar("T", bound=Dispatched)


def cost_s(task: Dispatched) -> float:
    """Return how long a call will take as far as is known; an unknown one counts as endless."""
    expected_s = task.expected_s
    return _UNKNOWN_S if expected_s is None else expected_s


class ReadyQueue(Generic[T]):
    """Waiting tasks: each flow in its order, and the flows in turns of ``QUANTUM_S`` of work.

    So a single call does not wait behind a hundred thousand of another function or thread.
    """

    __slots__ = ("_dropped", "_flows", "_left_s", "_nwaiting", "_turns")

    def __init__(self) -> None:
        self._flows: dict[Hashable, deque[T]] = {}
        self._turns: deque[deque[T]] = deque()
        """The flows that are not empty, the one whose turn it is first."""
        self._left_s = QUANTUM_S
        self._nwaiting = 0
        self._dropped: set[str] = set()

    def __len__(self) -> int:
        return self._nwaiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over what waits, one of each flow in turn."""
        flows = deque(iter(flow) for flow in self._turns)
        while flows:
            flow = flows.popleft()
            task = next(flow, None)
            if task is not None:
                flows.append(flow)
                if task.task_id not in self._dropped:
                    yield task

    def append(self, task: T) -> None:
        """Let ``task`` wait behind the others of its flow."""
        flow = self._flows.get(task.flow)
        if flow is None:
            flow = self._flows[task.flow] = deque()
            self._turns.append(flow)
        flow.append(task)
        self._nwaiting += 1

    def appendleft(self, task: T) -> None:
        """Let ``task`` wait in front of the others of its flow; an empty flow is next."""
        flow = self._flows.get(task.flow)
        if flow is None:
            flow = self._flows[task.flow] = deque()
            self._turns.appendleft(flow)
            self._left_s = QUANTUM_S
        flow.appendleft(task)
        self._nwaiting += 1

    def first(self) -> T:
        """Return what is next."""
        return self._turns[0][0]

    def popleft(self) -> T:
        """Take out what is next."""
        flow = self._turns[0]
        task = flow.popleft()
        self._nwaiting -= 1
        self._left_s -= cost_s(task)
        if self._dropped:
            self._skip_dropped(flow)
        if not flow:
            self._end(flow, task)
        elif self._left_s <= 0.0:
            self._turns.rotate(-1)
            self._left_s = QUANTUM_S
        return task

    def drop(self, task: T) -> None:
        """Forget a task that waits. Costs the same wherever it is: it is skipped when its turn comes."""
        flow = self._flows[task.flow]
        self._nwaiting -= 1
        self._dropped.add(task.task_id)
        self._skip_dropped(flow)
        if not flow:
            self._end(flow, task)

    def _skip_dropped(self, flow: deque[T]) -> None:
        while flow and flow[0].task_id in self._dropped:
            self._dropped.remove(flow.popleft().task_id)

    def _end(self, flow: deque[T], last: T) -> None:
        del self._flows[last.flow]
        if self._turns[0] is flow:
            self._turns.popleft()
            self._left_s = QUANTUM_S
        else:
            self._turns.remove(flow)

    def leases_worth(self) -> float:
        """Return how many leases the waiting work would keep busy for as long as one takes to get."""
        # The calls of one flow are of one function, so one stands for all.
        return sum(len(flow) * min(1.0, cost_s(flow[0]) / LEASE_S) for flow in self._turns)
