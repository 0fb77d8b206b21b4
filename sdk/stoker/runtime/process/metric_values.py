"""The values of the metrics that this process counts, until its node has them.

``stoker.util.metrics`` changes them, from any thread; the runtime takes what is new to the nodelet.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field

from stoker_wire.messages.node_api import MetricKind, MetricSeries, ReportedMetric

MAX_METRICS = 1000
MAX_SERIES = 10_000
"""Of one metric; tags with more values than that are ids, which belong in a log."""


@dataclass(slots=True)
class Values:
    """The values of one metric, by those of its tags: since the last report, or of a gauge as they are."""

    name: str
    kind: MetricKind
    description: str
    tag_keys: tuple[str, ...]
    boundaries: tuple[float, ...] = ()
    numbers: dict[tuple[str, ...], float] = field(default_factory=dict)
    counts: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    def meaning(self) -> tuple[object, ...]:
        """Return what two metrics of one name must have in common."""
        return self.kind, self.tag_keys, self.boundaries


class MetricTable:
    """The metrics of this process. Metrics that are made again by the same name share their values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Values] = {}
        self.changed = False
        """Whether there is something that the last report did not have."""

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def add(self, values: Values) -> Values | None:
        """Return the values of the metric of this name, these if it is new; None if that means another."""
        with self._lock:
            if values.name not in self._metrics and len(self._metrics) >= MAX_METRICS:
                return None
            known = self._metrics.setdefault(values.name, values)
            return known if known.meaning() == values.meaning() else None

    def increase(self, values: Values, key: tuple[str, ...], amount: float) -> bool:
        """Add to a counter; return False if there is no room for another series."""
        with self._lock:
            if not _has_room(values, key):
                return False
            values.numbers[key] = values.numbers.get(key, 0.0) + amount
            self.changed = True
            return True

    def set(self, values: Values, key: tuple[str, ...], value: float) -> bool:
        """Set a gauge; return False if there is no room for another series."""
        with self._lock:
            if not _has_room(values, key):
                return False
            values.numbers[key] = value
            self.changed = True
            return True

    def observe(self, values: Values, key: tuple[str, ...], value: float) -> bool:
        """Count a value of a histogram; return False if there is no room for another series."""
        with self._lock:
            if not _has_room(values, key):
                return False
            counts = values.counts.setdefault(key, [0] * (len(values.boundaries) + 1))
            counts[bisect.bisect_left(values.boundaries, value)] += 1
            values.numbers[key] = values.numbers.get(key, 0.0) + value
            self.changed = True
            return True

    def take(self) -> tuple[ReportedMetric, ...]:
        """Return what a report says; counters and histograms begin at 0 again."""
        with self._lock:
            self.changed = False
            return tuple(_taken(values) for values in self._metrics.values())

    def give_back(self, metrics: tuple[ReportedMetric, ...]) -> None:
        """Add what a report has said that did not arrive."""
        with self._lock:
            self.changed = True
            for one in metrics:
                if one.kind is not MetricKind.GAUGE:
                    _give_back(self._metrics[one.name], one)


def _has_room(values: Values, key: tuple[str, ...]) -> bool:
    return key in values.numbers or len(values.numbers) < MAX_SERIES


def _taken(values: Values) -> ReportedMetric:
    series = tuple(
        MetricSeries(tags=key, value=value, counts=tuple(values.counts.get(key, ())))
        for key, value in values.numbers.items()
    )
    if values.kind is not MetricKind.GAUGE:
        values.numbers, values.counts = {}, {}
    return ReportedMetric(
        name=values.name,
        kind=values.kind,
        description=values.description,
        tag_keys=values.tag_keys,
        boundaries=values.boundaries,
        series=series,
    )


def _give_back(values: Values, reported: ReportedMetric) -> None:
    for one in reported.series:
        values.numbers[one.tags] = values.numbers.get(one.tags, 0.0) + one.value
        if one.counts:
            since = values.counts.get(one.tags) or [0] * len(one.counts)
            values.counts[one.tags] = [a + b for a, b in zip(since, one.counts, strict=True)]


TABLE = MetricTable()
