"""The metrics of one service as Prometheus reads them, in its text format 0.0.4.

Components count in plain numbers and distributions; what they have is read when somebody asks, so that
counting costs next to nothing. A registry of prometheus_client has what comes from elsewhere: the process,
and the metrics of programs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from stoker_wire.errors import InternalError
from stoker_wire.process.metrics.bounded_label import OTHER
from stoker_wire.process.metrics.catalogue import BY_NAME, MetricSpec
from stoker_wire.process.metrics.distribution import LATENCY_BOUNDS, Distribution
from stoker_wire.process.metrics.loop_lag import LoopLag
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

Reading: TypeAlias = float | Distribution | Mapping[Any, float | Distribution]
"""A number, a distribution, or those by the value of the label, or a tuple of those of the labels."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT"})
_log = logging.getLogger(__name__)


class Metrics:
    """The metrics of the service ``service`` (several services may share a process)."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: str) -> None:
        self.service = service
        self.lag = LoopLag()
        self._shown: dict[str, tuple[MetricSpec, Callable[[], Reading]]] = {}
        self._process, self._programs = CollectorRegistry(), CollectorRegistry()
        self._measurements: list[Callable[[], Awaitable[None]]] = []
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._seconds: dict[tuple[str, ...], Distribution] = {}
        ProcessCollector(registry=self._process)
        self.show("stoker_build_info", lambda: {(service, VERSION): 1})
        self.show("stoker_event_loop_lag_seconds", lambda: self.lag.seconds)
        self.show("stoker_http_requests_total", lambda: self._requests)
        self.show("stoker_http_request_seconds", lambda: self._seconds)

    def show(self, name: str, read: Callable[[], Reading]) -> None:
        """Show a metric of the catalogue; ``read`` is called at each scrape."""
        spec = BY_NAME.get(name)
        if spec is None:
            raise InternalError(f"{name} is no metric\nadd it to the catalogue of metrics")
        self._shown[name] = (spec, read)

    def measure_first(self, measure: Callable[[], Awaitable[None]]) -> None:
        """Await ``measure`` before each scrape: of what takes too long for an event loop to read."""
        self._measurements.append(measure)

    async def measure(self) -> None:
        """Measure what :meth:`render` then shows."""
        for measure in self._measurements:
            await measure()

    def add_programs(self, collector: Collector) -> None:
        """Show the metrics of users' programs as well, which a collector of prometheus_client has."""
        self._programs.register(collector)

    @property
    def names(self) -> frozenset[str]:
        """The names of the catalogue that are shown."""
        return frozenset(self._shown)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request; ``route`` is the template, never the path (cardinality).

        Strangers choose the method, and a gateway's reader takes any word for one.
        """
        method = method if method in _METHODS else OTHER
        self._requests[method, route, str(status)] += 1
        took = self._seconds.get((method, route))
        if took is None:
            took = self._seconds[method, route] = Distribution(LATENCY_BOUNDS)
        took.observe(seconds)

    def render(self, *, of_users: bool = True) -> bytes:
        """Return the exposition text; without ``of_users`` what names functions and jobs is left out."""
        lines: list[str] = []
        for spec, read in self._shown.values():
            if spec.tells_of_users and not of_users:
                continue
            lines += (f"# HELP {spec.name} {spec.help}", f"# TYPE {spec.name} {spec.exposed_type}")
            try:
                lines += _samples(spec, read())
            except OSError as error:  # of a file of the kernel: the others are there all the same
                _log.warning("%s cannot be measured: %s", spec.name, error)
        text = "\n".join((*lines, "")).encode() + generate_latest(self._process)
        return text + generate_latest(self._programs) if of_users else text


def _samples(spec: MetricSpec, reading: Reading) -> Iterator[str]:
    by_labels = reading if isinstance(reading, Mapping) else {(): reading}
    for key, value in by_labels.items():
        if isinstance(value, Distribution):
            if value.heads is None:
                value.heads = _heads(spec.name, _labels(spec, key), value)
            *buckets, total, count = value.heads
            counts = list(accumulate(value.counts))
            yield from map("%s%d".__mod__, zip(buckets, counts, strict=True))
            yield f"{total}{value.total}"
            yield f"{count}{counts[-1]}"
        else:
            labels = _labels(spec, key)
            yield f"{spec.name}{{{labels}}} {value}" if labels else f"{spec.name} {value}"


def _labels(spec: MetricSpec, key: str | tuple[str, ...]) -> str:
    pairs = zip(spec.labels, (key,) if isinstance(key, str) else key, strict=True)
    return ",".join(f'{name}="{_escaped(text)}"' for name, text in pairs)


def _heads(name: str, labels: str, value: Distribution) -> list[str]:
    """Return the beginnings of the lines of a histogram: its buckets, its sum and its count."""
    comma, braced = ("," if labels else ""), (f"{{{labels}}}" if labels else "")
    bounds = (*map(str, value.bounds), "+Inf")
    buckets = [f'{name}_bucket{{{labels}{comma}le="{bound}"}} ' for bound in bounds]
    return [*buckets, f"{name}_sum{braced} ", f"{name}_count{braced} "]


def _escaped(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text
