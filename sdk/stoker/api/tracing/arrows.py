"""Arrows of a timeline from a caller to what it called, whichever of the two comes first. Pure.

Callers come after what they called, and long after: a bounded number waits, and the rest have no arrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_WAITING = 100_000
_SLACK_US = 1_000_000
"""By so much the clocks of two nodes may differ."""


class Place(NamedTuple):
    """A slice of the timeline."""

    pid: int
    tid: int
    begin: int
    end: int

    def holds(self, at: int) -> bool:
        """Return whether it was under way at a time, by clocks that may differ."""
        return self.begin - _SLACK_US <= at <= self.end + _SLACK_US


class Arrows:
    """The arrows of one timeline."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max = max_waiting
        self._places: dict[tuple[str, int], Place] = {}
        """The slices of attempts, by task and attempt."""
        self._waiting: dict[str, list[tuple[int, Place]]] = {}
        """What was called and when, by the caller that has not come yet."""
        self._count = 0
        self._number = 0
        self.left_out = 0

    def add_attempt(self, task_id: str, attempt: int, place: Place) -> Iterator[dict[str, Any]]:
        """Add the slice of an attempt; yield the arrows from it."""
        while len(self._places) >= self._max:
            del self._places[next(iter(self._places))]
        self._places[task_id, attempt] = place
        left = []
        for at, callee in self._waiting.pop(task_id, ()):
            if place.holds(at):
                self._count -= 1
                yield from self.arrow(place, at, callee)
            else:  # another attempt of the caller has called it
                left.append((at, callee))
        if left:
            self._waiting[task_id] = left

    def add_call(
        self, parent: str, attempts: int, at: int, callee: Place
    ) -> Iterator[dict[str, Any]]:
        """Add a call that a task made at a time; yield its arrow if the caller is known."""
        for attempt in range(attempts):
            place = self._places.get((parent, attempt))
            if place is not None and place.holds(at):
                yield from self.arrow(place, at, callee)
                return
        if self._count >= self._max:
            self.left_out += 1
            return
        self._count += 1
        self._waiting.setdefault(parent, []).append((at, callee))

    def arrow(self, caller: Place, at: int, callee: Place) -> Iterator[dict[str, Any]]:
        """Yield an arrow from within one slice to the beginning of another."""
        self._number += 1
        common = {"name": "call", "cat": "call", "id": self._number}
        begin = min(max(at, caller.begin), caller.end, callee.begin)
        if begin < caller.begin:  # the callee's clock is behind
            self.left_out += 1
            return
        yield {**common, "ph": "s", "pid": caller.pid, "tid": caller.tid, "ts": begin}
        yield {
            **common, "ph": "f", "bp": "e", "pid": callee.pid, "tid": callee.tid, "ts": callee.begin
        }  # fmt: skip

    def close(self) -> None:
        """Count what waits for callers that did not come."""
        self.left_out += self._count
