"""Metrics of programs at a node: sums over processes, gauges of each, and bounds."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from stoker_nodelet.telemetry import program_metrics
from stoker_nodelet.telemetry.program_metrics import GAUGE_S, JOB_S, ProgramMetrics
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.node_api import MetricKind, MetricSeries, ReportedMetric, ReportMetrics


class Node:
    """The metrics of a node whose clock stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.metrics = ProgramMetrics(clock=lambda: self.now_s)
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)

    def report(self, *metrics: ReportedMetric, process: str = "w_1", job_id: str = "job_1") -> None:
        self.metrics.report(job_id, ReportMetrics(process=process, metrics=metrics))

    def shown(self) -> dict[str, float]:
        lines = generate_latest(self.registry).decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@pytest.fixture
def node() -> Node:
    return Node()


def counter(value: float, *tags: str, name: str = "calls") -> ReportedMetric:
    keys = ("route", "code")[: len(tags)]
    series = (MetricSeries(tags=tags, value=value),)
    return ReportedMetric(name=name, kind=MetricKind.COUNTER, tag_keys=keys, series=series)


def gauge(value: float, name: str = "level") -> ReportedMetric:
    series = (MetricSeries(tags=(), value=value),)
    return ReportedMetric(name=name, kind=MetricKind.GAUGE, series=series)


def histogram(value: float, *counts: int) -> ReportedMetric:
    return ReportedMetric(
        name="took",
        kind=MetricKind.HISTOGRAM,
        boundaries=(1.0, 10.0),
        series=(MetricSeries(tags=(), value=value, counts=counts),),
    )


def test_counters_add_up_over_processes_and_go_on_where_one_ends(node: Node) -> None:
    node.report(counter(2, "/a"), process="w_1")
    node.report(counter(3, "/a"), process="w_2")
    node.report(counter(7, "/a"), job_id="job_2")
    assert node.shown() == {
        'calls_total{job_id="job_1",route="/a"}': 5.0,
        'calls_total{job_id="job_2",route="/a"}': 7.0,
    }
    node.now_s += GAUGE_S + 1
    node.report(counter(1, "/a"), process="w_2")
    assert node.shown()['calls_total{job_id="job_1",route="/a"}'] == 6.0


def test_a_gauge_is_one_for_each_process_and_ends_with_it(node: Node) -> None:
    node.report(gauge(1), process="w_1")
    node.report(gauge(2), process="w_2")
    node.report(gauge(3), process="w_2")
    assert node.shown() == {
        'level{job_id="job_1",process="w_1"}': 1.0,
        'level{job_id="job_1",process="w_2"}': 3.0,
    }
    node.now_s += GAUGE_S
    node.report(process="w_2")  # nothing new: it says that it still is
    node.now_s += 1
    assert node.shown() == {'level{job_id="job_1",process="w_2"}': 3.0}


def test_histograms_have_cumulative_buckets(node: Node) -> None:
    node.report(histogram(12.5, 1, 0, 1), process="w_1")
    node.report(histogram(3.0, 0, 1, 0), process="w_2")
    own = 'job_id="job_1"'
    assert node.shown() == {
        f'took_bucket{{{own},le="1.0"}}': 1.0,
        f'took_bucket{{{own},le="10.0"}}': 2.0,
        f'took_bucket{{{own},le="+Inf"}}': 3.0,
        f"took_count{{{own}}}": 3.0,
        f"took_sum{{{own}}}": 15.5,
    }


def test_a_job_that_reports_no_more_is_forgotten(node: Node) -> None:
    node.report(counter(1), gauge(1))
    node.now_s += JOB_S + 1
    assert node.shown() == {}
    node.report(counter(1))
    assert node.shown() == {'calls_total{job_id="job_1"}': 1.0}


def test_two_jobs_that_mean_different_things_by_a_name_do_not_mix(node: Node) -> None:
    node.report(counter(1, name="x"))
    node.report(gauge(2, name="x"), job_id="job_2")
    assert node.shown() == {'x_total{job_id="job_1"}': 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        gauge(1, name="calls"),
        counter(1, "/a", "200"),
        histogram(1.0, 1, 1),
        ReportedMetric(name="y", kind=MetricKind.COUNTER, tag_keys=("job_id",)),
        ReportedMetric(name="y", kind=MetricKind.COUNTER, tag_keys=("a", "a")),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_of_it_is_added(
    node: Node, wrong: ReportedMetric
) -> None:
    node.report(counter(1, "/a"))
    with pytest.raises(BadRequestError):
        node.report(counter(1, "/a"), wrong)
    assert node.shown() == {'calls_total{job_id="job_1",route="/a"}': 1.0}


def test_series_are_bounded_and_known_ones_still_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_metrics, "MAX_SERIES", 2)
    node.report(counter(1, "/a"))
    node.report(counter(1, "/b"))
    with pytest.raises(BadRequestError, match="takes no more"):
        node.report(counter(1, "/c"))
    node.report(counter(1, "/b"))
    assert node.shown()['calls_total{job_id="job_1",route="/b"}'] == 2.0
    node.now_s += JOB_S + 1
    node.report(counter(1, "/c"))
