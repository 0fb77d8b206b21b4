"""The catalogue of metrics is by Prometheus' conventions; what is made of it is current and names what is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml

from scripts import alerts, dashboard, metrics_page
from stoker_gcs.api.routes import ROUTES as GCS_ROUTES
from stoker_nodelet.telemetry.metrics.worker_counts import ExitCause
from stoker_nodelet.transfer.service import PullCounts
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import TaskState
from stoker_wire.process.metrics.catalogue import BY_NAME, METRICS, SERVICES, MetricSpec, MetricType

if TYPE_CHECKING:
    from pathlib import Path

COMPOSE = alerts.RULES.parents[2] / "docker-compose.yml"
CONFIG = alerts.RULES.parent / "prometheus.yml"
TARGET_LABELS = {"job", "instance", "service", "node"}
UNITS = ("_seconds", "_bytes", "_ratio", "_celsius", "_watts")
NAME = re.compile(r"\b(stoker_[a-z0-9_]+)(\{[^}]*\})?")
GROUPED = re.compile(r"(?:by|on) \(([^)]*)\)")
VALUES: dict[tuple[str, str], set[str]] = {
    ("stoker_events_total", "kind"): set(EventKind),
    ("stoker_tasks_ended_total", "state"): set(TaskState),
    ("stoker_worker_exits_total", "cause"): set(ExitCause),
    ("stoker_transfers_total", "outcome"): set(PullCounts().outcomes),
    ("stoker_leader", "service"): set(SERVICES),
}
"""What labels can be that expressions name."""


def expressions() -> dict[str, str]:
    """Every expression, by where it is."""
    found = {alert.name: alert.expr for alert in alerts.ALERTS}
    for panels in dashboard.ROWS.values():
        for panel in panels:
            found |= {f"{panel.title}: {legend}": expr for expr, legend in panel.lines}
    return found


def spec_of(name: str) -> MetricSpec:
    """The metric that a name in an expression is of; KeyError if there is none."""
    series = re.sub(r"_(bucket|sum|count)$", "", name)
    spec = BY_NAME.get(series)
    if series != name and spec is not None and spec.type is MetricType.HISTOGRAM:
        return spec
    return BY_NAME[name]


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_a_name_is_by_the_conventions(spec: MetricSpec) -> None:
    assert re.fullmatch(r"stoker_[a-z][a-z0-9_]*[a-z0-9]", spec.name)
    assert spec.name.endswith("_total") == (spec.type is MetricType.COUNTER)
    assert spec.name.endswith("_info") == (spec.type is MetricType.INFO)
    assert not re.search(r"_(count|sum|bucket|gauge|counter|histogram)$", spec.name)
    assert not re.search(r"_(ms|milliseconds|kb|mb|percent|minutes)(_|$)", spec.name)
    if spec.type is MetricType.HISTOGRAM:
        assert spec.name.endswith(UNITS)
    assert set(spec.services) <= set(SERVICES)
    assert spec.help.endswith(".") and not spec.help[0].islower() and "\n" not in spec.help
    assert not TARGET_LABELS.intersection(spec.labels), "labels that targets have"
    assert not {"task_id", "worker_id", "object_id", "actor_id"}.intersection(spec.labels)


def test_a_name_is_in_the_table_once() -> None:
    assert len(BY_NAME) == len(METRICS)


def test_what_is_made_of_the_table_is_current() -> None:
    assert metrics_page.METRICS_PAGE.read_text() == metrics_page.metrics_page(), "run: make docs"
    assert alerts.RULES.read_text() == alerts.rules_text(), "run: make docs"
    assert dashboard.DASHBOARD.read_text() == dashboard.dashboard_text(), "run: make docs"


@pytest.mark.parametrize(("where", "expr"), expressions().items())
def test_an_expression_names_what_there_is(where: str, expr: str) -> None:
    names = NAME.findall(expr)
    assert names or "process_" in expr or "up{" in expr
    labels = {"le"} | TARGET_LABELS
    for name, selector in names:
        spec = spec_of(name)
        labels |= set(spec.labels)
        for label, value in re.findall(r'(\w+)(?:=~?|!=|!~)"([^"]*)"', selector):
            assert label in {*spec.labels, *TARGET_LABELS}, name
            assert value in VALUES.get((spec.name, label), {value})
    for group in GROUPED.findall(expr):
        assert set(group.split(", ")) <= labels, where


def test_every_row_of_the_dashboard_has_its_place() -> None:
    panels = json.loads(dashboard.dashboard_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_configuration_asks_a_route_that_there_is() -> None:
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert job["job_name"] == "stoker", "as the rules say"
    asked = [urlsplit(one["url"]) for one in job["http_sd_configs"]]
    assert {one.path for one in asked} <= {route.path for route in GCS_ROUTES}
    named = {one.netloc for one in asked} | set(job["static_configs"][0]["targets"])
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ports = {
        f"{name}:{service['environment']['STOKER_PORT']}"
        for name, service in services.items()
        if "STOKER_PORT" in service.get("environment", {})
    }
    assert named <= ports
    assert {one for one in ports if one.startswith(("gcs", "gateway"))} == named


def test_promtool_accepts_the_rules_and_the_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool: install Debian's package prometheus")
    for what in (("rules", str(alerts.RULES)), ("config", "--syntax-only", str(CONFIG))):
        told = subprocess.run(
            [promtool, "check", *what], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, told.stdout + told.stderr
