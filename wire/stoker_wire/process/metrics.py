"""Metrics of one service, in a registry of its own (several services may share a process).

Made by the HTTP server as ``service.metrics``; components add theirs through it, so that all
names begin with ``stoker_`` and show up at ``/metrics``.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

LATENCY_BUCKETS = (
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
    1,
    2.5,
    5,
    10,
    30,
)


class Metrics:
    """The metrics of one service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self.counter(
            "http_requests_total", "Requests answered.", ("method", "route", "status")
        )
        self._seconds = self.histogram(
            "http_request_seconds", "Time to answer a request.", ("method", "route")
        )
        self._answered: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        """Return a new counter ``stoker_<name>``."""
        return Counter(f"stoker_{name}", meaning, labels, registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        """Return a new gauge ``stoker_<name>``."""
        return Gauge(f"stoker_{name}", meaning, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS,
    ) -> Histogram:
        """Return a new histogram ``stoker_<name>``; ``buckets`` default to latencies in seconds."""
        return Histogram(
            f"stoker_{name}", meaning, labels, registry=self.registry, buckets=tuple(buckets)
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request; ``route`` is the template, never the path (cardinality)."""
        key = (method, route, status)
        pair = self._answered.get(key)
        if pair is None:
            pair = self._answered[key] = (
                self._requests.labels(method, route, str(status)),
                self._seconds.labels(method, route),
            )
        pair[0].inc()
        pair[1].observe(seconds)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
