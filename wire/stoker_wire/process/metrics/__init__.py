"""Metrics of services, for Prometheus: the table of all, what they are made of, and ``/metrics``.

``catalogue`` names each metric once; a service's ``Metrics`` shows those of its own, read from the
components at each scrape; a ``Distribution`` is what a histogram is made of, ``BoundedLabel`` keeps labels
that users choose from growing without end. See docs/metrics.md.
"""

from stoker_wire.process.metrics.bounded_label import BoundedLabel
from stoker_wire.process.metrics.distribution import (
    LATENCY_BOUNDS,
    SPAN_BOUNDS,
    START_BOUNDS,
    Distribution,
)
from stoker_wire.process.metrics.exposition import Metrics

__all__ = [
    "LATENCY_BOUNDS",
    "SPAN_BOUNDS",
    "START_BOUNDS",
    "BoundedLabel",
    "Distribution",
    "Metrics",
]
