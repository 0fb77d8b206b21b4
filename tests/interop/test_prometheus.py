"""A real Prometheus with the configuration of ``deploy/``: ``make interop INTEROP_ARGS=prometheus``.

It finds all services of a real cluster; each expression of the dashboard and of the alerts is one to it, and
those that should have data have some.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from scripts import alerts, dashboard
from stoker_wire.process.metrics.catalogue import SERVICES
from tests.e2e.http._metrics import monitored_cluster, token_of, work
from tests.services import ReservedPort, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

PROGRAM = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="there is no prometheus: install Debian's package prometheus"
)
CONFIG = alerts.RULES.parent / "prometheus.yml"
TOKEN_FILE = "/etc/prometheus/stoker-token"
WAIT_S = 90.0
WITHOUT_DATA = {
    "stoker_gpu_temperature_celsius": "a fake GPU has none",
    "stoker_gpu_power_watts": "a fake GPU draws none",
    "stoker_gpu_memory_used_bytes": "nobody measures a fake GPU",
    "stoker_gpu_utilization_ratio": "nobody measures a fake GPU",
    "stoker_gpu_quarantined": "nobody measures a fake GPU",
    "stoker_gpu_allocated_ratio": "nobody holds it any more",
    "stoker_scheduler_requests_rejected_total": "nothing was refused",
}
EXPRESSIONS = [
    (f"{panel.title}: {legend}", expr)
    for panels in dashboard.ROWS.values()
    for panel in panels
    for expr, legend in panel.lines
]


class Prometheus:
    """A server, and what it knows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = ReservedPort()
        self.url = f"http://127.0.0.1:{self._port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = [
            str(PROGRAM),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        try:
            until(lambda: self.answers(process), WAIT_S, "Prometheus answers", interval_s=0.2)
            yield
        finally:
            process.kill()
            process.wait()

    def answers(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer; an expression that is none fails with what is wrong with it."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")

    def value(self, expr: str) -> list[Any]:
        """Return what an expression has now; ranges of Grafana are a minute."""
        expr = expr.replace("$__rate_interval", "1m")
        found: list[Any] = self.ask("query", query=expr)["result"]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with monitored_cluster(tmp_path_factory.mktemp("s")) as made:
        yield made


@pytest.fixture(scope="module")
def prometheus(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    token = folder / "token"
    token.write_text(token_of(cluster, "viewer"))
    shutil.copy(alerts.RULES, folder)
    changes = {
        "http://gcs:7600": cluster.info.gcs_url,
        "http://gcs2:7600": cluster.info.gcs_url,
        "gateway:7600": urllib.parse.urlsplit(cluster.info.gateway_url).netloc,
        TOKEN_FILE: str(token),
        "15s": "1s",
    }
    text = CONFIG.read_text()
    for shipped, here in changes.items():
        assert shipped in text
        text = text.replace(shipped, here)
    (folder / "prometheus.yml").write_text(text)
    server = Prometheus(folder)
    with server.running():
        until(lambda: services_up(server) == set(SERVICES), WAIT_S, "all are scraped", 0.5)
        work(cluster)
        work(cluster)  # a rate needs a change after the first sample
        yield server


def services_up(server: Prometheus) -> set[str]:
    return {
        target["labels"]["service"]
        for target in server.ask("targets", state="active")["activeTargets"]
        if target["health"] == "up"
    }


def test_all_targets_are_up_and_none_is_there_twice(prometheus: Prometheus) -> None:
    targets = prometheus.ask("targets", state="active")["activeTargets"]
    assert [target["lastError"] for target in targets] == [""] * len(SERVICES)
    assert sorted(target["labels"]["service"] for target in targets) == sorted(SERVICES)
    assert {target["labels"]["job"] for target in targets} == {"stoker"}
    (nodelet,) = [target for target in targets if target["labels"]["service"] == "nodelet"]
    assert nodelet["labels"]["node"].startswith("n_")


@pytest.mark.parametrize(("where", "expr"), EXPRESSIONS)
def test_an_expression_of_the_dashboard_has_data(
    prometheus: Prometheus, where: str, expr: str
) -> None:
    if any(name in expr for name in WITHOUT_DATA):
        prometheus.value(expr)
        return
    until(lambda: prometheus.value(expr), WAIT_S, f"{where} has data", interval_s=0.5)


def test_tasks_of_a_function_are_seen_as_they_were(prometheus: Prometheus) -> None:
    def ended() -> bool:
        found = prometheus.value('sum(stoker_tasks_ended_total{function="square"})')
        return bool(found) and float(found[0]["value"][1]) == 40

    until(ended, WAIT_S, "all 40 calls are counted", interval_s=0.5)


def test_the_alerts_are_evaluated_and_a_healthy_cluster_raises_none(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        return all(rule["health"] == "ok" for rule in rules) and len(rules) == len(alerts.ALERTS)

    until(evaluated, WAIT_S, "all rules are evaluated", interval_s=0.5)
    raised = {one["labels"]["alertname"] for one in prometheus.ask("alerts")["alerts"]}
    assert not raised & {alert.name for alert in alerts.ALERTS if alert.severity == "critical"}
    assert "StokerNodeDied" not in raised and "StokerTaskRecordsLost" not in raised


def test_an_alert_is_raised_for_a_target_that_is_gone(prometheus: Prometheus) -> None:
    (alert,) = [one for one in alerts.ALERTS if one.name == "StokerNoGcsLeads"]
    assert prometheus.value(alert.expr) == []
    assert prometheus.value(alert.expr.replace("== 1", "== 2")) != [], "if none led"
