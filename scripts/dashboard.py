"""Makes ``deploy/grafana/stoker.json``: a dashboard of the whole cluster.

``tests/unit/test_monitoring.py`` fails when the file is not current, or names a metric that there is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "deploy/grafana/stoker.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its title, the unit by Grafana's name, and expressions with what each line is called."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _p(title: str, unit: str, *lines: tuple[str, str]) -> Panel:
    return Panel(title, unit, lines)


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _quantile(part: float, metric: str, by: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({part}, {_rate(f'{metric}_bucket', labels)})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Cluster": (
        _p("Services that answer", "short", ('sum by (service) (up{job="stoker"})', "{{service}}")),
        _p("Nodes", "short", ("max by (state) (stoker_nodes)", "{{state}}")),
        _p("Live jobs", "short", ("max(stoker_jobs_live)", "jobs")),
        _p(
            "Resources allocated",
            "percentunit",
            (
                (
                    "max by (resource) (stoker_scheduler_resource_allocated)"
                    " / max by (resource) (stoker_scheduler_resource_capacity > 0)"
                ),
                "{{resource}}",
            ),
        ),
        _p(
            "Leases",
            "short",
            ("sum by (phase) (stoker_scheduler_leases)", "{{phase}}"),
            ("sum(stoker_scheduler_leases_waiting)", "waiting"),
            ("sum(stoker_scheduler_leases_preempted)", "preempted"),
        ),
        _p(
            "Leases per second",
            "ops",
            ("sum(rate(stoker_scheduler_leases_granted_total[$__rate_interval]))", "granted"),
            ("sum(rate(stoker_scheduler_leases_lost_total[$__rate_interval]))", "lost"),
            ("sum(rate(stoker_scheduler_preemptions_total[$__rate_interval]))", "ended for others"),
            (_rate("stoker_scheduler_requests_rejected_total", "reason"), "refused: {{reason}}"),
        ),
        _p(
            "Wait for a lease",
            "s",
            (_quantile(0.5, "stoker_scheduler_lease_wait_seconds"), "median"),
            (_quantile(0.95, "stoker_scheduler_lease_wait_seconds"), "95 %"),
        ),
        _p(
            "Events per second",
            "ops",
            ("max by (kind) (rate(stoker_events_total[$__rate_interval]))", "{{kind}}"),
        ),
        _p("Watches", "short", ("sum by (instance) (stoker_event_watchers)", "{{instance}}")),
    ),
    "Tasks": (
        _p(
            "Ends per second, by state",
            "ops",
            (_rate("stoker_tasks_ended_total", "state"), "{{state}}"),
        ),
        _p(
            "Ends per second, by function",
            "ops",
            (f"topk(10, {_rate('stoker_tasks_ended_total', 'function')})", "{{function}}"),
        ),
        _p("Failures per second", "ops", (_rate("stoker_task_failures_total", "code"), "{{code}}")),
        _p(
            "Run time, 95 %",
            "s",
            (f"topk(10, {_quantile(0.95, 'stoker_task_run_seconds', 'function')})", "{{function}}"),
        ),
        _p(
            "Wait, 95 %",
            "s",
            (
                f"topk(10, {_quantile(0.95, 'stoker_task_wait_seconds', 'function')})",
                "{{function}}",
            ),
        ),
        _p(
            "Records per second",
            "ops",
            ("sum(rate(stoker_task_records_total[$__rate_interval]))", "stored"),
            ("sum(rate(stoker_task_records_dropped_total[$__rate_interval]))", "lost"),
        ),
        _p(
            "CPUs in use, by job",
            "short",
            (f"topk(10, {_rate('stoker_job_cpu_seconds_total', 'job_id')})", "{{job_id}}"),
        ),
        _p(
            "GPUs held, by job",
            "short",
            (f"topk(10, {_rate('stoker_job_gpu_seconds_total', 'job_id')})", "{{job_id}}"),
        ),
    ),
    "Nodes": (
        _p(
            "CPU in use",
            "percentunit",
            (
                (
                    '1 - sum by (instance) (rate(stoker_node_cpu_seconds_total{mode=~"idle|iowait"}'
                    "[$__rate_interval])) / sum by (instance)"
                    " (rate(stoker_node_cpu_seconds_total[$__rate_interval]))"
                ),
                "{{instance}}",
            ),
        ),
        _p(
            "Memory in use",
            "percentunit",
            ("stoker_node_memory_used_bytes / stoker_node_memory_capacity_bytes", "{{instance}}"),
        ),
        _p(
            "Disk in use",
            "percentunit",
            (
                "1 - stoker_node_disk_free_bytes / stoker_node_disk_capacity_bytes",
                "{{instance}} {{disk}}",
            ),
        ),
        _p(
            "Network",
            "Bps",
            (_rate("stoker_node_network_received_bytes_total", "instance"), "in {{instance}}"),
            (_rate("stoker_node_network_sent_bytes_total", "instance"), "out {{instance}}"),
        ),
        _p("Workers", "short", ("sum by (state) (stoker_workers)", "{{state}}")),
        _p(
            "Ends of workers per second",
            "ops",
            (_rate("stoker_worker_exits_total", "cause"), "{{cause}}"),
        ),
        _p(
            "Start of a worker",
            "s",
            (_quantile(0.5, "stoker_worker_start_seconds"), "median"),
            (_quantile(0.95, "stoker_worker_start_seconds"), "95 %"),
        ),
        _p("Load", "short", ("stoker_node_load1 / stoker_node_cpus", "{{instance}}, per CPU")),
        _p("Short of", "short", ("sum by (resource) (stoker_node_pressure)", "{{resource}}")),
    ),
    "Objects": (
        _p(
            "Shared memory in use",
            "percentunit",
            ("stoker_arena_used_bytes / stoker_arena_capacity_bytes", "{{instance}}"),
        ),
        _p(
            "Objects",
            "bytes",
            ("sum(stoker_arena_object_bytes)", "in memory"),
            ("sum(stoker_arena_disk_bytes)", "on disk"),
        ),
        _p(
            "Spilled",
            "Bps",
            (_rate("stoker_arena_spilled_bytes_total", "instance"), "{{instance}}"),
        ),
        _p(
            "Transfers between nodes",
            "Bps",
            (_rate("stoker_transfer_received_bytes_total", "instance"), "in {{instance}}"),
            (_rate("stoker_transfer_sent_bytes_total", "instance"), "out {{instance}}"),
        ),
        _p(
            "Pulls that go on",
            "short",
            ("sum by (instance) (stoker_transfers_active)", "{{instance}}"),
        ),
        _p("Pulls per second", "ops", (_rate("stoker_transfers_total", "outcome"), "{{outcome}}")),
    ),
    "GPUs": (
        _p(
            "Utilisation",
            "percentunit",
            ("stoker_gpu_utilization_ratio", "{{instance}} GPU {{gpu}}"),
        ),
        _p(
            "Memory in use",
            "percentunit",
            (
                "stoker_gpu_memory_used_bytes / stoker_gpu_memory_capacity_bytes",
                "{{instance}} GPU {{gpu}}",
            ),
        ),
        _p(
            "Allocated, by job",
            "short",
            ("sum by (job_id) (stoker_gpu_allocated_ratio)", "{{job_id}}"),
        ),
        _p(
            "Temperature", "celsius", ("stoker_gpu_temperature_celsius", "{{instance}} GPU {{gpu}}")
        ),
        _p("Power", "watt", ("stoker_gpu_power_watts", "{{instance}} GPU {{gpu}}")),
        _p(
            "Not in use",
            "short",
            ("sum by (instance) (stoker_gpu_quarantined)", "{{instance}}"),
        ),
    ),
    "Control plane": (
        _p(
            "Requests per second",
            "ops",
            (_rate("stoker_http_requests_total", "service"), "{{service}}"),
        ),
        _p(
            "Requests that fail",
            "ops",
            (
                (
                    'sum by (service, status) (rate(stoker_http_requests_total{status=~"[45].."}'
                    "[$__rate_interval]))"
                ),
                "{{service}} {{status}}",
            ),
        ),
        _p(
            "Time of requests, 95 %",
            "s",
            (
                f"topk(10, {_quantile(0.95, 'stoker_http_request_seconds', 'service, route')})",
                "{{service}} {{route}}",
            ),
        ),
        _p(
            "Lag of event loops, 99 %",
            "s",
            (
                _quantile(0.99, "stoker_event_loop_lag_seconds", "service, instance"),
                "{{service}} {{instance}}",
            ),
        ),
        _p(
            "Transactions per second",
            "ops",
            (_rate("stoker_sql_transactions_total", "queue"), "{{queue}}"),
            (_rate("stoker_sql_failures_total", "queue"), "{{queue}}, failed"),
        ),
        _p(
            "Time of transactions",
            "s",
            (_quantile(0.5, "stoker_sql_transaction_seconds", "queue"), "{{queue}}, median"),
            (_quantile(0.99, "stoker_sql_transaction_seconds", "queue"), "{{queue}}, 99 %"),
        ),
        _p(
            "Writes that wait",
            "short",
            ("sum by (queue) (stoker_sql_queue_length)", "{{queue}}"),
        ),
        _p(
            "CPU of services",
            "short",
            (
                'sum by (service) (rate(process_cpu_seconds_total{job="stoker"}[$__rate_interval]))',
                "{{service}}",
            ),
        ),
        _p(
            "Memory of services",
            "bytes",
            (
                'max by (service, instance) (process_resident_memory_bytes{job="stoker"})',
                "{{service}} {{instance}}",
            ),
        ),
    ),
}


def dashboard_text() -> str:
    """Return the dashboard as Grafana imports it."""
    document = {
        "uid": "stoker",
        "title": "Stoker",
        "tags": ["stoker"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": list(_panels()),
    }
    return json.dumps(document, indent=1) + "\n"


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for row, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        for number, panel in enumerate(panels):
            x = number * _WIDTH % _COLUMNS
            place = {
                "x": x,
                "y": y + 1 + number * _WIDTH // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            made.append(_graph(len(made) + 1, panel, place))
        y += 1 + -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT
    return made


def _graph(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for index, (expr, legend) in enumerate(panel.lines)
        ],
    }
