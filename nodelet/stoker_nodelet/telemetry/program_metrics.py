"""Metrics that programs count, at this node's ``/metrics``: what their processes report, by job.

Counters and histograms are sums over the processes of a job, which report what was added; so they go on
where a worker ends. Gauges have a value for each process, and end with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.node_api import MetricKind, MetricSeries, ReportedMetric, ReportMetrics

GAUGE_S = 180.0
"""A gauge is kept this long after the last report of its process, which reports once a minute at least."""
JOB_S = 3600.0
MAX_SERIES = 20_000
"""Of one node; what is more is refused."""
JOB_LABEL, PROCESS_LABEL = "job_id", "process"
_OWN_LABELS = frozenset({JOB_LABEL, PROCESS_LABEL, "le"})


@dataclass(slots=True)
class _Series:
    value: float = 0.0
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Metric:
    """A metric of one job. The key of a series are the values of its labels."""

    kind: MetricKind
    description: str
    tag_keys: tuple[str, ...]
    boundaries: tuple[float, ...]
    series: dict[tuple[str, ...], _Series] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        own = (JOB_LABEL, PROCESS_LABEL) if self.kind is MetricKind.GAUGE else (JOB_LABEL,)
        return (*self.tag_keys, *own)


@dataclass(slots=True, eq=False)
class ProgramMetrics:
    """The metrics of all jobs on this node; a collector of the service's registry."""

    clock: Callable[[], float] = time.monotonic
    _jobs: dict[str, dict[str, _Metric]] = field(default_factory=dict)
    _reported_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """When each process of each job reported last."""
    _count: int = 0

    def report(self, job_id: str, report: ReportMetrics) -> None:
        """Add what a process of a job reports, all or nothing; ``BadRequestError`` for what does not fit."""
        self._forget_silent()
        metrics = self._jobs.get(job_id, {})
        for one in report.metrics:
            _check(one, metrics.get(one.name))
        new = sum(len(one.series) for one in report.metrics)
        if self._count + new > MAX_SERIES:
            new = self._count_new(metrics, job_id, report)
        if self._count + new > MAX_SERIES:
            raise BadRequestError(
                f"this node has {MAX_SERIES} series of programs' metrics, and takes no more\n"
                "use fewer values of tags",
                field="metrics",
            )
        self._reported_s[job_id, report.process] = self.clock()
        for one in report.metrics:
            metric = self._jobs.setdefault(job_id, {}).setdefault(
                one.name, _Metric(one.kind, one.description, one.tag_keys, one.boundaries)
            )
            for series in one.series:
                self._add(metric, _key(metric.kind, series, job_id, report.process), series)

    def _count_new(self, metrics: dict[str, _Metric], job_id: str, report: ReportMetrics) -> int:
        nothing: dict[tuple[str, ...], _Series] = {}
        return sum(
            _key(one.kind, series, job_id, report.process)
            not in (metrics[one.name].series if one.name in metrics else nothing)
            for one in report.metrics
            for series in one.series
        )

    def _add(self, metric: _Metric, key: tuple[str, ...], added: MetricSeries) -> None:
        known = metric.series.get(key)
        if known is None:
            known = metric.series[key] = _Series(counts=[0] * len(added.counts))
            self._count += 1
        if metric.kind is MetricKind.GAUGE:
            known.value = added.value
        else:
            known.value += added.value
            known.counts = [a + b for a, b in zip(known.counts, added.counts, strict=True)]

    def _forget_silent(self) -> None:
        """Forget the gauges of processes that are gone, and the rest an hour after a job's last report."""
        now_s = self.clock()
        last_s: dict[str, float] = {}
        for (job_id, _), at_s in self._reported_s.items():
            last_s[job_id] = max(at_s, last_s.get(job_id, at_s))
        for job_id in [one for one, at_s in last_s.items() if now_s - at_s > JOB_S]:
            for metric in self._jobs.pop(job_id, {}).values():
                self._count -= len(metric.series)
        for (job_id, process), at_s in list(self._reported_s.items()):
            if now_s - at_s <= GAUGE_S:
                continue
            for metric in self._jobs.get(job_id, {}).values():
                if metric.kind is MetricKind.GAUGE:
                    for key in [one for one in metric.series if one[-1] == process]:
                        del metric.series[key]
                        self._count -= 1
            if at_s != last_s[job_id] or job_id not in self._jobs:
                del self._reported_s[job_id, process]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with the series of all jobs that mean the same by its name."""
        self._forget_silent()
        families: dict[str, tuple[_Metric, Metric]] = {}
        for metrics in self._jobs.values():
            for name, metric in metrics.items():
                first, family = families.setdefault(name, (metric, _family(name, metric)))
                if (first.kind, first.labels) == (metric.kind, metric.labels):
                    for key, series in metric.series.items():
                        _expose(family, metric, key, series)
        for _, family in families.values():
            yield family


def _key(kind: MetricKind, series: MetricSeries, job_id: str, process: str) -> tuple[str, ...]:
    own = (job_id, process) if kind is MetricKind.GAUGE else (job_id,)
    return (*series.tags, *own)


def _check(reported: ReportedMetric, known: _Metric | None) -> None:
    name, keys = reported.name, reported.tag_keys
    taken = _OWN_LABELS.intersection(keys)
    if taken or len(set(keys)) != len(keys):
        raise BadRequestError(
            f"metric {name}: tags {', '.join(keys)}\n"
            f"give each once, and none of {', '.join(sorted(_OWN_LABELS))}",
            field="metrics",
        )
    counts = len(reported.boundaries) + 1 if reported.kind is MetricKind.HISTOGRAM else 0
    if any(len(one.tags) != len(keys) or len(one.counts) != counts for one in reported.series):
        raise BadRequestError(
            f"metric {name}: a value does not fit its tags or boundaries\n"
            "give a text for each tag, and a count for each boundary and one more",
            field="metrics",
        )
    asked = (reported.kind, keys, reported.boundaries)
    if known is not None and (known.kind, known.tag_keys, known.boundaries) != asked:
        raise BadRequestError(
            f"metric {name} is a {known.kind} with other tags or boundaries in this job\n"
            "give one of them another name",
            field="metrics",
        )


def _family(name: str, metric: _Metric) -> Metric:
    families = {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
    family: Metric = families[metric.kind](name, metric.description, labels=metric.labels)
    return family


def _expose(family: Metric, metric: _Metric, key: tuple[str, ...], series: _Series) -> None:
    if isinstance(family, HistogramMetricFamily):
        bounds = [*map(str, metric.boundaries), "+Inf"]
        buckets = list(zip(bounds, accumulate(series.counts), strict=True))
        family.add_metric(key, buckets, series.value)
    elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
        family.add_metric(key, series.value)
