"""``ray.util.metrics``: Stoker's counters, gauges and histograms, exported by Ray's names (``ray_...``)."""

from __future__ import annotations

from typing import Any

from stoker.ray.mapping.lacking import attribute_error
from stoker.util import metrics

__all__ = ("Count", "Counter", "Gauge", "Histogram", "Metric")

_PREFIX = "ray_"


class Counter(metrics.Counter):
    """A value that grows."""

    prefix = _PREFIX


Count = Counter


class Gauge(metrics.Gauge):
    """A value that is set."""

    prefix = _PREFIX


class Histogram(metrics.Histogram):
    """Counts of values between boundaries."""

    prefix = _PREFIX


Metric = (Counter, Gauge, Histogram)
"""For ``isinstance``."""


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
