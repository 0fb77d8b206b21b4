"""Metrics of a program: what a report has, and what is refused where it is written."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.ray.util import metrics as of_ray
from stoker.runtime.process import metric_values
from stoker.runtime.process.metric_values import MetricTable
from stoker.util import metrics
from stoker.util.metrics import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from stoker_wire.messages.node_api import ReportedMetric


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> MetricTable:
    table = MetricTable()
    monkeypatch.setattr(metrics, "TABLE", table)
    return table


def reported(table: MetricTable) -> dict[str, dict[tuple[str, ...], Any]]:
    return {one.name: values_of(one) for one in table.take()}


def values_of(metric: ReportedMetric) -> dict[tuple[str, ...], Any]:
    return {one.tags: (one.value, *one.counts) for one in metric.series}


def test_a_report_has_what_is_new_and_gauges_as_they_are(table: MetricTable) -> None:
    calls = Counter("calls", "Calls.", tag_keys=("route", "code"))
    calls.set_default_tags({"code": "200"})
    calls.inc(tags={"route": "/"})
    calls.inc(2, tags={"route": "/", "code": "500"})
    Counter("calls", tag_keys=("route", "code")).inc(tags={"route": "/", "code": "200"})
    level = Gauge("level")
    level.set(1)
    level.set(2.5)
    took = Histogram("took", boundaries=[10, 1])
    for value in (0.5, 1, 2, 100):
        took.observe(value)
    assert reported(table) == {
        "calls": {("/", "200"): (2.0,), ("/", "500"): (2.0,)},
        "level": {(): (2.5,)},
        "took": {(): (103.5, 2, 1, 1)},
    }
    assert not table.changed
    assert reported(table) == {"calls": {}, "level": {(): (2.5,)}, "took": {}}


def test_what_did_not_arrive_is_reported_again(table: MetricTable) -> None:
    calls, took, level = Counter("calls"), Histogram("took", boundaries=[1]), Gauge("level")
    calls.inc()
    took.observe(2)
    level.set(1)
    lost = table.take()
    calls.inc()
    level.set(2)
    table.give_back(lost)
    assert table.changed
    assert reported(table) == {
        "calls": {(): (2.0,)},
        "took": {(): (2.0, 0, 1)},
        "level": {(): (2.0,)},
    }


def test_a_metric_travels_and_is_the_same_metric_there(table: MetricTable) -> None:
    calls = Counter("calls", tag_keys=("route",)).set_default_tags({"route": "/"})
    pickle.loads(pickle.dumps(calls)).inc()
    pickle.loads(pickle.dumps(Histogram("took", boundaries=[1]))).observe(1)
    assert reported(table) == {"calls": {("/",): (1.0,)}, "took": {(): (1.0, 1, 0)}}


def test_rays_metrics_have_rays_names(table: MetricTable) -> None:
    calls = of_ray.Counter("calls", tag_keys=("a",))
    calls.inc(tags={"a": "b"})
    assert calls.info["name"] == "calls"
    assert isinstance(calls, of_ray.Metric)
    assert reported(table) == {"ray_calls": {("b",): (1.0,)}}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Counter(""), BadRequestError),
        (lambda: Counter("a-b"), BadRequestError),
        (lambda: Counter("1a"), BadRequestError),
        (lambda: Counter("stoker_x"), BadRequestError),
        (lambda: Counter("x" * 201), BadRequestError),
        (lambda: Counter(1), WrongTypeError),
        (lambda: Counter("x", tag_keys="abc"), WrongTypeError),
        (lambda: Counter("x", tag_keys=("a", "a")), BadRequestError),
        (lambda: Counter("x", tag_keys=("job_id",)), BadRequestError),
        (lambda: Histogram("x"), BadRequestError),
        (lambda: Histogram("x", boundaries=[0, 1]), BadRequestError),
        (lambda: Histogram("x", boundaries=[1, float("inf")]), BadRequestError),
        (lambda: Gauge("known"), BadRequestError),
        (lambda: Counter("y").inc(0), BadRequestError),
        (lambda: Counter("y").inc("1 more"), WrongTypeError),
        (lambda: Gauge("z").set(float("nan")), BadRequestError),
        (lambda: Counter("y").inc(tags={"a": "b"}), BadRequestError),
        (lambda: Counter("w", tag_keys=("a",)).inc(), BadRequestError),
        (lambda: Counter("w", tag_keys=("a",)).inc(tags={"a": 1}), WrongTypeError),
    ],
)
def test_mistakes_are_errors_where_they_are_made(make: Any, error: type[Exception]) -> None:
    Counter("known")
    with pytest.raises(error):
        make()


def test_series_and_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_values, "MAX_SERIES", 1)
    monkeypatch.setattr(metric_values, "MAX_METRICS", 1)
    calls = Counter("calls", tag_keys=("a",))
    calls.inc(tags={"a": "1"})
    with pytest.raises(BadRequestError, match="combinations of tags"):
        calls.inc(tags={"a": "2"})
    calls.inc(tags={"a": "1"})
    with pytest.raises(BadRequestError):
        Counter("more")
