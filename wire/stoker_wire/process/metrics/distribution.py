"""Distributions of measured values: what a histogram of Prometheus shows, cheap enough for every task."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BOUNDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Of what takes milliseconds: requests, transactions, turns of an event loop."""
START_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of what takes up to a minute: starts of workers, pulls of objects."""
SPAN_BOUNDS = (
    0.001,
    0.01,
    0.1,
    0.5,
    1.0,
    5.0,
    15.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    14_400.0,
    86_400.0,
)
"""Of what takes from a millisecond to a day: tasks, and what they wait."""


class Distribution:
    """A count of values for each of ``bounds``, and their sum."""

    __slots__ = ("bounds", "counts", "heads", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Of each bound the values up to it and above the one before; the last: those above all."""
        self.total = 0.0
        self.heads: list[str] | None = None
        """The lines that show it up to their values: they stay the same, and are most of the work."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
