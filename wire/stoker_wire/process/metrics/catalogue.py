"""The table of all metrics of Stoker's services: the one place that names them.

Names are by Prometheus' conventions. docs/metrics.md, the alerts and the dashboard are made and checked
by this table, and each service shows its part of it. No label has an id of a task or a worker; those that
users choose (functions, jobs, resources) are bounded by the setting ``metrics_max_labels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

GCS, SCHEDULER, NODELET, GATEWAY = "gcs", "scheduler", "nodelet", "gateway"
SERVICES = (GCS, SCHEDULER, NODELET, GATEWAY)


_OF_USERS = frozenset({"function", "job_id"})


class MetricType(StrEnum):
    """The type of a metric; an ``info`` is a gauge that is 1, and whose labels tell something."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name, what it means, its labels, and the services that show it.

    With ``optional`` a service may have none of it, as a node without GPUs.
    """

    name: str
    type: MetricType
    help: str
    services: tuple[str, ...]
    labels: tuple[str, ...] = ()
    optional: bool = False

    @property
    def tells_of_users(self) -> bool:
        """Whether its labels are of users, who do not see what is of others."""
        return not _OF_USERS.isdisjoint(self.labels)

    @property
    def exposed_type(self) -> str:
        """The type in the text format, which knows no ``info``."""
        return "gauge" if self.type is MetricType.INFO else self.type.value


def _type_of(name: str) -> MetricType:
    if name.endswith("_total"):
        return MetricType.COUNTER
    return MetricType.INFO if name.endswith("_info") else MetricType.GAUGE


def _one(
    name: str, help_: str, *labels: str, by: tuple[str, ...], optional: bool = False
) -> MetricSpec:
    """Return a counter, gauge or info, as its name says."""
    return MetricSpec(f"stoker_{name}", _type_of(name), help_, by, labels, optional)


def _many(name: str, help_: str, *labels: str, by: tuple[str, ...]) -> MetricSpec:
    """Return a histogram."""
    return MetricSpec(f"stoker_{name}", MetricType.HISTOGRAM, help_, by, labels)


_GCS, _SCHEDULER, _NODELET = (GCS,), (SCHEDULER,), (NODELET,)
_gcs, _scheduler = partial(_one, by=_GCS), partial(_one, by=_SCHEDULER)
_node, _gateway = partial(_one, by=_NODELET), partial(_one, by=(GATEWAY,))

METRICS = (
    # every service
    _one("build_info", "The service and its version.", "component", "version", by=SERVICES),
    _many(
        "event_loop_lag_seconds",
        "How much later than due timers of the event loop ran.",
        by=SERVICES,
    ),
    _one(
        "http_requests_total",
        "Requests answered; of routes by their templates.",
        "method",
        "route",
        "status",
        by=SERVICES,
    ),
    _many(
        "http_request_seconds",
        "Time to answer a request; a watch counts when it ends.",
        "method",
        "route",
        by=SERVICES,
    ),
    _one("http_requests_in_progress", "Requests being answered.", by=(GCS, SCHEDULER, NODELET)),
    # tasks
    _gcs(
        "tasks_ended_total",
        "Attempts of tasks and calls of actors that ended, by their final state.",
        "function",
        "state",
    ),
    _gcs("task_failures_total", "Attempts that failed, by the code of their error.", "code"),
    _many("task_run_seconds", "Time from an attempt's start to its end.", "function", by=_GCS),
    _many(
        "task_wait_seconds",
        "Time from a task's submission to the start of the attempt.",
        "function",
        by=_GCS,
    ),
    _gcs("task_records_total", "Task records accepted."),
    _one("task_records_dropped_total", "Task records lost: must stay 0.", by=(GCS, NODELET)),
    _gcs("task_records_unreadable_total", "Damaged task records that lists met: must stay 0."),
    _node(
        "task_records_forwarded_total",
        "Task records that this node's nodelet has forwarded to the gcs.",
    ),
    # the gcs
    _one("leader", "1 if this replica leads, else 0.", by=(GCS, SCHEDULER)),
    _gcs("nodes", "Nodes, by state.", "state"),
    _gcs("jobs_live", "Jobs that have not ended."),
    _gcs("events_total", "Events that this replica read or wrote, by kind.", "kind"),
    _gcs("event_log_sequence", "Sequence number of the newest event."),
    _gcs("event_watchers", "Watches of the event log that are open."),
    _gcs(
        "sql_transactions_total",
        "Transactions that were committed, of changes and of task history.",
        "queue",
    ),
    _gcs("sql_failures_total", "Transactions that failed; their writers were told.", "queue"),
    _gcs("sql_writes_total", "Changes, or reports of tasks, in those transactions.", "queue"),
    _many(
        "sql_transaction_seconds",
        "Time of a transaction, from its begin to its commit.",
        "queue",
        by=_GCS,
    ),
    _gcs("sql_queue_length", "Writes that wait for the transaction before.", "queue"),
    _gcs("database_up", "1 while the database answers, else 0."),
    _gcs("redis_up", "1 while Redis answers, else 0. Without Redis there is none.", optional=True),
    _gcs("redis_round_trips_total", "Writes to Redis that were answered.", optional=True),
    _gcs("redis_failures_total", "Writes to and reads from Redis that failed.", optional=True),
    # the scheduler
    _scheduler("scheduler_nodes", "Nodes that are known."),
    _scheduler("scheduler_leases", "Leases that exist, by phase.", "phase"),
    _scheduler(
        "scheduler_leases_preempted", "Leases that are to end for other work, and have not yet."
    ),
    _scheduler("scheduler_requests_waiting", "Requests for leases that are not answered yet."),
    _scheduler(
        "scheduler_leases_waiting", "Leases that those requests want and no node has room for."
    ),
    _scheduler("scheduler_leases_placed_total", "Leases for which a node was chosen."),
    _scheduler("scheduler_leases_granted_total", "Leases that were granted to who requested them."),
    _scheduler(
        "scheduler_leases_lost_total",
        "Granted leases whose worker, node or owner went away, or that were ended.",
    ),
    _scheduler(
        "scheduler_preemptions_total", "Leases that were ended for other work, after notice."
    ),
    _scheduler(
        "scheduler_requests_rejected_total",
        "Requests that were refused for good, by reason.",
        "reason",
    ),
    _many(
        "scheduler_lease_wait_seconds",
        "Time from a request to the grant of a lease.",
        by=_SCHEDULER,
    ),
    _scheduler(
        "scheduler_resource_capacity",
        "What living nodes have of a resource (CPUs, GPUs, bytes of memory).",
        "resource",
    ),
    _scheduler("scheduler_resource_allocated", "What leases have allocated of it.", "resource"),
    # nodes
    _node("node_info", "The node, and the machine that it is on.", "node_id", "hostname"),
    _node("node_cpus", "CPUs that this node may use."),
    _node("node_cpu_seconds_total", "Time of the machine's CPUs, by mode.", "mode"),
    _node("node_load1", "Processes that run or wait for a CPU, on average of one minute."),
    _node(
        "node_memory_capacity_bytes", "Memory of the node: the machine's, or its cgroup's limit."
    ),
    _node("node_memory_used_bytes", "Memory in use, without what the kernel can drop."),
    _node("node_disk_capacity_bytes", "Size of a file system that the node writes to.", "disk"),
    _node("node_disk_free_bytes", "Room in it.", "disk"),
    _node("node_disk_read_bytes_total", "Bytes read from the machine's disks."),
    _node("node_disk_written_bytes_total", "Bytes written to them."),
    _node("node_network_received_bytes_total", "Bytes received by the machine, but from itself."),
    _node("node_network_sent_bytes_total", "Bytes sent by the machine, but to itself."),
    _node(
        "node_pressure",
        "1 while the node takes no new work because it is short of this.",
        "resource",
    ),
    # workers
    _node("workers", "Worker processes and drivers of the node, by state.", "state"),
    _node("worker_starts_total", "Processes that were started."),
    _many(
        "worker_start_seconds",
        "Time from the order to start a worker until it is ready.",
        by=_NODELET,
    ),
    _node("worker_exits_total", "Processes that ended, by cause.", "cause"),
    _node("node_leases", "Leases on the node, by phase.", "phase"),
    # objects
    _node("arena_capacity_bytes", "Limit of the node's shared memory for objects."),
    _node("arena_used_bytes", "Shared memory in use, with what is kept to be used again."),
    _node("arena_objects", "Objects on the node, in memory and on disk."),
    _node("arena_object_bytes", "Bytes of the objects in memory."),
    _node("arena_disk_bytes", "Bytes of the objects on disk, which are read there."),
    _node("arena_spilled_objects_total", "Objects that were moved to disk for want of room."),
    _node("arena_spilled_bytes_total", "Bytes of those."),
    _node("transfers_active", "Pulls of other nodes' objects that go on."),
    _node("transfers_total", "Such pulls that ended, by outcome (ok, failed or freed).", "outcome"),
    _many("transfer_seconds", "Time of a pull that brought its object.", by=_NODELET),
    _node("transfer_received_bytes_total", "Bytes of objects that were pulled from other nodes."),
    _node(
        "transfer_sent_bytes_total", "Bytes of objects that were sent to other nodes and processes."
    ),
    # GPUs
    _node("gpus", "GPUs of the node, measured or not."),
    _node(
        "gpu_utilization_ratio",
        "Part of the last moment in which the GPU computed, from 0 to 1.",
        "gpu",
        optional=True,
    ),
    _node("gpu_memory_used_bytes", "Memory of the GPU in use, by whomever.", "gpu", optional=True),
    _node("gpu_memory_capacity_bytes", "Memory of the GPU.", "gpu", optional=True),
    _node("gpu_temperature_celsius", "Temperature of the GPU.", "gpu", optional=True),
    _node("gpu_power_watts", "Power that the GPU draws.", "gpu", optional=True),
    _node(
        "gpu_ecc_errors_total",
        "Uncorrected memory errors since the driver was loaded.",
        "gpu",
        optional=True,
    ),
    _node(
        "gpu_allocated_ratio",
        "Part of the GPU that leases have, by job.",
        "gpu",
        "job_id",
        optional=True,
    ),
    _node(
        "gpu_quarantined",
        "1 while no lease gets the GPU, because it is not well or not free.",
        "gpu",
        optional=True,
    ),
    # jobs
    _node(
        "job_cpu_seconds_total",
        "CPU time that processes of a job took on this node.",
        "job_id",
        optional=True,
    ),
    _node(
        "job_gpu_seconds_total",
        "GPUs that a job had on this node, times the seconds.",
        "job_id",
        optional=True,
    ),
    # the gateway
    _gateway("gateway_connections", "Connections that are joined or whose requests are passed on."),
    _gateway("gateway_callers", "Processes that call for tokens."),
)
"""In the order of the page and of the exposition."""

BY_NAME = {spec.name: spec for spec in METRICS}
