"""Lanes: the rows of a timeline on which nothing overlaps, of things that may run at the same time. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_KEPT = 64
"""Gaps of a lane that are remembered: what comes is nearly in order, whichever way."""


class _Lane:
    """The taken parts of a lane, as disjoint spans in order. Gaps far from the last change count as taken."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def take(self, begin: int, end: int) -> bool:
        """Take a span; return False if some of it is taken."""
        at = bisect_right(self._begins, begin)
        if at and self._ends[at - 1] > begin:
            return False
        if at < len(self._begins) and self._begins[at] < end:
            return False
        if at and self._begins[at - 1] == begin and self._ends[at - 1] == begin == end:
            return True
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        if len(self._begins) > _KEPT:
            first = 0 if at > _KEPT // 2 else _KEPT - 1
            del self._begins[first + 1], self._ends[first]
        return True


class Lanes:
    """The lanes of many rows, each as many as it needs."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, list[_Lane]] = {}

    def place(self, row: Hashable, begin: int, end: int) -> int:
        """Return the number of the first lane of a row that is free for a span, and take it."""
        lanes = self._lanes.setdefault(row, [])
        for number, lane in enumerate(lanes):
            if lane.take(begin, end):
                return number
        lanes.append(_Lane())
        lanes[-1].take(begin, end)
        return len(lanes) - 1


def nested(spans: Iterable[tuple[int, int, T]]) -> tuple[list[tuple[int, int, T]], Sequence[T]]:
    """Return the spans that lie beside or within each other, outer ones first, and the others."""
    inside: list[tuple[int, int, T]] = []
    across: list[T] = []
    open_: list[int] = []
    """The ends of the spans around."""
    for begin, end, item in sorted(spans, key=lambda one: (one[0], -one[1])):
        while open_ and open_[-1] <= begin:
            open_.pop()
        if open_ and open_[-1] < end:
            across.append(item)
            continue
        open_.append(end)
        inside.append((begin, end, item))
    return inside, across
