"""Makes ``deploy/prometheus/rules.yml``: the alerts that every cluster wants.

``tests/unit/test_monitoring.py`` fails when the file is not current, or names a metric that there is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RULES = Path(__file__).parents[1] / "deploy/prometheus/rules.yml"
_HEAD = """\
# Made by `make docs` from scripts/alerts.py: change the rules there. See docs/metrics.md.
groups:
  - name: stoker
    rules:
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: what holds for how long, how grave that is, and what to do."""

    name: str
    expr: str
    for_: str
    severity: str
    summary: str
    fix: str


ALERTS = (
    Alert(
        "StokerTargetDown",
        'up{job="stoker"} == 0',
        "1m",
        "critical",
        "{{ $labels.service }} {{ $labels.instance }} does not answer",
        "Look at its log and at the machine. 401 or 403 in Prometheus' page of targets: renew the token.",
    ),
    Alert(
        "StokerNoGcsLeads",
        'absent(stoker_leader{service="gcs"} == 1)',
        "30s",
        "critical",
        "no replica of the gcs leads: nothing is restarted, scheduled or cleaned up",
        "Look whether the database answers, and at the logs of the replicas.",
    ),
    Alert(
        "StokerNoSchedulerLeads",
        'absent(stoker_leader{service="scheduler"} == 1)',
        "30s",
        "critical",
        "no scheduler leads: nothing new starts",
        "Start one; look at the log of the one that should lead.",
    ),
    Alert(
        "StokerDatabaseDown",
        "stoker_database_up == 0",
        "30s",
        "critical",
        "the database does not answer {{ $labels.instance }}",
        "Look at PostgreSQL; jobs that run go on meanwhile.",
    ),
    Alert(
        "StokerRedisDown",
        "stoker_redis_up == 0",
        "1m",
        "warning",
        "Redis does not answer {{ $labels.instance }}: the database does its work meanwhile",
        "Start Redis again; it may come back empty.",
    ),
    Alert(
        "StokerSqlSlow",
        "histogram_quantile(0.99, sum by (instance, queue, le)"
        " (rate(stoker_sql_transaction_seconds_bucket[5m]))) > 1",
        "5m",
        "warning",
        "one of a hundred transactions of {{ $labels.instance }} takes more than a second",
        "Look at the database's disk and at its locks.",
    ),
    Alert(
        "StokerNodeDied",
        'increase(stoker_events_total{kind="node.died"}[10m]) > 0',
        "0m",
        "warning",
        "a node died in the last ten minutes",
        "stoker list nodes says which, and why; stoker story ID what came before.",
    ),
    Alert(
        "StokerNodePressure",
        "stoker_node_pressure == 1",
        "5m",
        "warning",
        "{{ $labels.instance }} is short of {{ $labels.resource }} and takes no new work",
        "Free some, or give the node more.",
    ),
    Alert(
        "StokerArenaFull",
        "stoker_arena_used_bytes / stoker_arena_capacity_bytes > 0.95",
        "10m",
        "warning",
        "the shared memory for objects of {{ $labels.instance }} is full",
        "Drop refs that are no longer needed, or raise STOKER_ARENA_MAX_BYTES.",
    ),
    Alert(
        "StokerNothingIsGranted",
        "stoker_scheduler_leases_waiting > 0"
        " and rate(stoker_scheduler_leases_granted_total[10m]) == 0",
        "15m",
        "warning",
        "work waits, and none was given a place for a quarter of an hour",
        "stoker explain ID says why; long tasks on a full cluster are a reason as well.",
    ),
    Alert(
        "StokerWorkersOutOfMemory",
        'increase(stoker_worker_exits_total{cause="out_of_memory"}[10m]) > 0',
        "0m",
        "warning",
        "workers of {{ $labels.instance }} were ended for want of memory",
        "stoker logs has what they used; declare memory= for such tasks.",
    ),
    Alert(
        "StokerWorkersKilled",
        'increase(stoker_worker_exits_total{cause="signal"}[10m]) > 3',
        "0m",
        "warning",
        "workers of {{ $labels.instance }} were killed, or crashed",
        "The event worker.exited has the signal and the last lines of the log.",
    ),
    Alert(
        "StokerTasksFail",
        'sum(rate(stoker_tasks_ended_total{state="FAILED"}[15m]))'
        " / sum(rate(stoker_tasks_ended_total[15m])) > 0.2",
        "15m",
        "warning",
        "one of five tasks fails",
        "The dashboard has the functions and the codes of their errors.",
    ),
    Alert(
        "StokerTaskRecordsLost",
        "increase(stoker_task_records_dropped_total[10m]) > 0",
        "0m",
        "warning",
        "records of tasks were lost at {{ $labels.instance }}",
        "Its log says why: most often a disk that was full.",
    ),
    Alert(
        "StokerTransfersFail",
        'increase(stoker_transfers_total{outcome="failed"}[10m]) > 10',
        "0m",
        "warning",
        "objects of other nodes do not reach {{ $labels.instance }}",
        "Look at the network between the nodes, and at the log of the nodelet.",
    ),
    Alert(
        "StokerEventLoopHeldUp",
        "histogram_quantile(0.95, sum by (instance, service, le)"
        " (rate(stoker_event_loop_lag_seconds_bucket[5m]))) > 0.5",
        "5m",
        "warning",
        "{{ $labels.service }} {{ $labels.instance }} is held up for half a second again and again",
        "Its machine has too few CPUs, or it swaps.",
    ),
    Alert(
        "StokerRequestsFail",
        "sum by (instance, service)"
        ' (rate(stoker_http_requests_total{status=~"5..",status!="503"}[5m]))'
        " / sum by (instance, service) (rate(stoker_http_requests_total[5m])) > 0.05",
        "5m",
        "warning",
        "one of twenty requests to {{ $labels.service }} {{ $labels.instance }} fails",
        "Its log has the requests under their ids.",
    ),
    Alert(
        "StokerGpuQuarantined",
        "stoker_gpu_quarantined == 1",
        "5m",
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is not in use: it is not well, or not free",
        "stoker get ID of the node says why; stoker node release-gpu puts it back once it is mended.",
    ),
    Alert(
        "StokerGpuErrors",
        "increase(stoker_gpu_ecc_errors_total[1h]) > 0",
        "0m",
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} had errors of its memory",
        "Drain the node, and have the GPU tested.",
    ),
    Alert(
        "StokerGpuHot",
        "stoker_gpu_temperature_celsius > 90",
        "10m",
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is at {{ $value }} degrees",
        "Look at the cooling.",
    ),
    Alert(
        "StokerGpuHeldAndIdle",
        "sum by (instance, gpu) (stoker_gpu_allocated_ratio) > 0.9 and on (instance, gpu)"
        " avg_over_time(stoker_gpu_utilization_ratio[30m]) < 0.05",
        "30m",
        "info",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is held and does nothing",
        "stoker_gpu_allocated_ratio names the job.",
    ),
)


def rules_text() -> str:
    """Return the file of rules."""
    return _HEAD + "\n".join(map(_rule, ALERTS))


def _rule(alert: Alert) -> str:
    return (
        f"      - alert: {alert.name}\n"
        f"        expr: {json.dumps(alert.expr)}\n"
        f"        for: {alert.for_}\n"
        f"        labels:\n          severity: {alert.severity}\n"
        f"        annotations:\n"
        f"          summary: {json.dumps(alert.summary)}\n"
        f"          description: {json.dumps(alert.fix)}\n"
    )
