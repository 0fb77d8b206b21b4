"""Every setting of Stoker in one typed, frozen object, read from ``STOKER_*`` variables.

Read once by each entry point (services, CLI, driver, worker) and handed down; nothing else reads
the environment for settings, and nothing changes a Settings after it was made. ``describe`` is what
``stoker config`` prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from stoker_wire.errors import UnknownOptionError
from stoker_wire.process.setting_values import (
    DEFAULT,
    PREFIX,
    SettingInfo,
    check_words,
    converted,
    masked,
    meaning_of,
    parsed,
    unknown_variables,
)
from stoker_wire.suggestions import suggestion


def default_session_root() -> str:
    """Return ``/tmp/stoker-<uid>``: short (Unix socket paths end at 107 bytes), and survives a log-out."""
    return f"/tmp/stoker-{os.getuid()}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Times are in seconds, sizes in bytes. An empty text means "not set"."""

    address: Annotated[
        str,
        Meta(
            description="URL of the gcs that a driver joins, or those of its replicas with commas "
            "between; empty: start a local cluster"
        ),
    ] = ""
    gcs_url: Annotated[
        str,
        Meta(
            description="URL of the gcs, for scheduler and nodelet, or those of its replicas with "
            "commas between"
        ),
    ] = ""
    database_url: Annotated[
        str, Meta(description="SQLAlchemy URL of the gcs's database; empty: SQLite in the session")
    ] = ""
    database_password_file: Annotated[
        str, Meta(description="file that holds the password that database_url leaves out")
    ] = ""
    redis_url: Annotated[
        str, Meta(description="URL of the gcs's ephemeral store (Redis); empty: its own memory")
    ] = ""
    redis_password_file: Annotated[
        str, Meta(description="file that holds the password that redis_url leaves out")
    ] = ""
    host: Annotated[str, Meta(description="address that a service listens on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port to listen on; 0: the service's own, or a free one"),
    ] = 0
    advertise_host: Annotated[
        str, Meta(description="name by which others reach this service; empty: derived from host")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="more names that a request's Host may carry")
    ] = ()
    token: Annotated[
        str, Meta(description="bearer token shared by all components; empty: use token_file")
    ] = ""
    token_file: Annotated[
        str,
        Meta(description="file that holds the token, mode 0600; made at first start, and followed"),
    ] = "~/.stoker/token"
    server_user: Annotated[
        str,
        Meta(
            description="Unix user (name or uid) as whom services on this machine run, if not as root or "
            "as you: a port of any other user gets no token"
        ),
    ] = ""
    tls: Annotated[
        str,
        Meta(
            description="TLS on every TCP port: off, server, or mutual, where clients have certificates "
            "too (docs/tls.md)"
        ),
    ] = "off"
    tls_cert: Annotated[
        str, Meta(description="certificate of this process, PEM, and those between it and its CA")
    ] = ""
    tls_key: Annotated[str, Meta(description="private key of that certificate, mode 0600")] = ""
    tls_ca: Annotated[
        str,
        Meta(description="CAs that others' certificates are signed by, PEM; empty: the system's"),
    ] = ""
    session_root: Annotated[
        str, Meta(description="folder of sessions (sockets, logs, SQLite file), mode 0700")
    ] = msgspec.field(default_factory=default_session_root)
    job_id: Annotated[str, Meta(description="job that this driver belongs to; set by Stoker")] = ""
    job_attempt: Annotated[
        int, Meta(ge=0, description="attempt of that job, from 1; set by Stoker")
    ] = 0
    namespace: Annotated[
        str, Meta(description="namespace of named actors; empty: the job's own")
    ] = ""

    request_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline of a request that names none")
    ] = 30.0
    retry_initial_s: Annotated[
        float, Meta(gt=0, description="upper bound of the first random pause before a retry")
    ] = 0.05
    retry_max_s: Annotated[
        float, Meta(gt=0, description="upper bound of any random pause before a retry")
    ] = 2.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="how long a stopping service lets requests finish")
    ] = 5.0
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="largest request body, where a route names no other limit")
    ] = 64 * 1024 * 1024
    unproven_connections: Annotated[
        int, Meta(ge=1, description="connections per service that have not shown a token yet")
    ] = 256
    unproven_s: Annotated[
        float, Meta(gt=0, description="how long a connection may take to show its token")
    ] = 10.0
    expensive_per_s: Annotated[
        float, Meta(ge=0, description="expensive requests per second of one user; 0: no limit")
    ] = 20.0
    failures_per_s: Annotated[
        float, Meta(ge=0, description="wrong tokens per second from one address; 0: no limit")
    ] = 50.0
    bookmark_s: Annotated[
        float, Meta(gt=0, description="how often a quiet watch sends its cursor")
    ] = 10.0

    heartbeat_s: Annotated[
        float, Meta(gt=0, description="pause between a nodelet's heartbeats")
    ] = 1.0
    suspect_after_s: Annotated[
        float, Meta(gt=0, description="silence after which a node gets no new work")
    ] = 3.0
    dead_after_s: Annotated[
        float, Meta(gt=0, description="silence after which a node and its work count as lost")
    ] = 10.0
    leader_ttl_s: Annotated[
        float, Meta(gt=0, description="life of the scheduler's leadership unless renewed")
    ] = 2.0
    lease_ttl_s: Annotated[
        float, Meta(gt=0, description="life of a lease that its owner does not list any more")
    ] = 10.0
    lease_idle_s: Annotated[
        float, Meta(ge=0, description="how long a runtime keeps a lease without work")
    ] = 0.5
    preemption_grace_s: Annotated[
        float,
        Meta(ge=0, description="time that preempted work has after its notice, if it names none"),
    ] = 30.0
    usage_half_life_s: Annotated[
        float,
        Meta(gt=0, description="time after which what a queue has used counts half against it"),
    ] = 3600.0
    elastic_policy: Annotated[
        str,
        Meta(
            description="who shares GPUs among elastic jobs: stoker, sia, pollux, tiresias, fifo, or an "
            "installed one"
        ),
    ] = "stoker"
    elastic_fairness: Annotated[
        float | None,
        Meta(
            ge=-1,
            le=1,
            description="of the policy stoker: the power mean of speedups over a fair share, from 1 (their "
            "sum) to -1 (the worst off); unset: least mean completion time",
        ),
    ] = None
    elastic_interval_s: Annotated[
        float, Meta(gt=0, description="time between two rounds that share GPUs among elastic jobs")
    ] = 60.0
    elastic_min_interval_s: Annotated[
        float,
        Meta(ge=0, description="time between two such rounds when jobs or nodes come or go"),
    ] = 5.0
    infeasible_grace_s: Annotated[
        float, Meta(ge=0, description="how long to wait for a fitting node before giving up")
    ] = 10.0
    node_return_s: Annotated[
        float,
        Meta(ge=0, description="how long what only a lost node could run waits for its return"),
    ] = 60.0
    extenders: Annotated[
        str,
        Meta(description="file with the extenders of the scheduler, as kube-scheduler's; or none"),
    ] = ""
    extender_answer_s: Annotated[
        float, Meta(gt=0, description="how long the answer of extenders holds for equal requests")
    ] = 5.0
    spread_threshold: Annotated[
        float, Meta(ge=0, le=1, description="utilisation up to which the hybrid policy packs nodes")
    ] = 0.5
    gateway_min_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="lowest port of a node, beside its nodelet's own, to which a gateway connects "
            "people: that from which on the kernel gives ports out",
        ),
    ] = 32768
    driver_reconnect_s: Annotated[
        float, Meta(ge=0, description="how long a job survives a lost driver session")
    ] = 3.0
    driver_unreachable_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a job survives a driver of which nothing is heard and nobody can say "
            "whether its process lives (a suspended laptop, a cut network)",
        ),
    ] = 60.0
    driver_unresponsive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a job survives a driver whose process lives but does not answer "
            "(stopped, in a debugger, in a long call of C); 0: for ever",
        ),
    ] = 0.0
    restart_reconnect_s: Annotated[
        float, Meta(ge=0, description="how long drivers may take to return after a gcs restart")
    ] = 10.0

    num_cpus: Annotated[float | None, Meta(description="CPUs of this node; unset: as found")] = None
    num_gpus: Annotated[float | None, Meta(description="GPUs of this node; unset: as found")] = None
    memory: Annotated[
        int | None, Meta(description="bytes of memory of this node; unset: as found")
    ] = None
    memory_threshold: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of this node's memory above which a worker is stopped; 0: never "
            "(docs/memory.md)",
        ),
    ] = 0.95
    memory_period_s: Annotated[
        float, Meta(gt=0, description="how often the memory of workers is measured")
    ] = 0.25
    memory_pressure_at: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of this node's memory above which it takes no new work; 0: never",
        ),
    ] = 0.93
    disk_pressure_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="a node takes no new work while a disk that it writes to has less free (of a "
            "small one, 5 %); 0: never",
        ),
    ] = 1 << 30
    resources: Annotated[
        dict[str, float], Meta(description="further resources of this node, as JSON")
    ] = {}
    labels: Annotated[dict[str, str], Meta(description="labels of this node, as JSON")] = {}
    taints: Annotated[
        str, Meta(description="taints of this node, as key=value:NoSchedule,key:NoExecute")
    ] = ""
    fake_gpus: Annotated[
        int, Meta(ge=0, description="pretend that this node has so many GPUs (tests)")
    ] = 0
    fake_gpu_file: Annotated[
        str, Meta(description="JSON file of GPUs that this node pretends to have (docs/gpus.md)")
    ] = ""
    gpu_isolation: Annotated[
        str,
        Meta(description="have the kernel keep workers off GPUs of others: auto, required or off"),
    ] = "auto"
    gpu_free_timeout_s: Annotated[
        float,
        Meta(ge=0, description="how long the memory of a released GPU may take to be free"),
    ] = 30.0
    worker_idle_s: Annotated[
        float, Meta(ge=0, description="how long an idle worker process lives")
    ] = 60.0
    prestart_workers: Annotated[
        int, Meta(ge=0, description="idle workers that a node keeps forked ahead of need")
    ] = 1
    inline_max_bytes: Annotated[
        int,
        Meta(ge=0, description="largest value sent inside a message, not through shared memory"),
    ] = 102_400
    arena_max_bytes: Annotated[
        int | None, Meta(description="shared memory for objects; unset: 30 % of the node's memory")
    ] = None
    arena_warm_bytes: Annotated[
        int,
        Meta(ge=0, description="freed shared memory that is kept to be used again for a while"),
    ] = 512 << 20
    arena_spill_at: Annotated[
        float,
        Meta(gt=0, le=1, description="share of shared memory above which objects go to disk"),
    ] = 0.8
    share_arenas: Annotated[
        bool,
        Meta(description="read the shared memory of other nodes of this machine directly"),
    ] = True
    container_engine: Annotated[str, Meta(description="runs images; unset: docker or podman")] = ""
    spill_dir: Annotated[
        str, Meta(description="where objects go from a full shared memory; unset: the session's")
    ] = ""

    run_as: Annotated[
        str, Meta(description="Unix user of jobs whose token names none, where the nodelet is root")
    ] = ""
    run_as_dir: Annotated[str, Meta(description="folder of those users' jobs; unset: /tmp")] = ""
    job_dir_keep_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a job's folder on a node is kept after the job's end and its last "
            "process there",
        ),
    ] = 86_400.0
    job_output_root: Annotated[
        str,
        Meta(description="folder that all nodes share, for what jobs write; unset: the session's"),
    ] = ""

    kernel_cache_dir: Annotated[
        str,
        Meta(
            description="folder on a local disk for compiled kernels; unset: TRITON_CACHE_DIR, or "
            "/var/tmp/stoker-UID/kernels"
        ),
    ] = ""
    kernel_cache_max_bytes: Annotated[
        int, Meta(ge=0, description="size above which the kernels used least recently are removed")
    ] = 4 << 30
    kernel_arch: Annotated[
        int,
        Meta(ge=0, description="compute capability (90) to compile for where no GPU says its own"),
    ] = 0
    kernel_compile_timeout_s: Annotated[
        float, Meta(gt=0, description="how long the kernels of a runtime_env may take to compile")
    ] = 600.0

    metrics_max_labels: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="functions, and jobs, that metrics of one process tell apart; more are 'other' "
            "(docs/metrics.md)",
        ),
    ] = 100

    log_level: Annotated[str, Meta(description="debug, info, warning, error or critical")] = "info"
    log_format: Annotated[
        str, Meta(description="json, text, or auto (text on a terminal, else json)")
    ] = "auto"
    wait_notice_s: Annotated[
        float,
        Meta(
            ge=0, description="after how long a driver says on stderr what it waits for; 0: never"
        ),
    ] = 5.0
    log_to_driver: Annotated[bool, Meta(description="print workers' output at the driver")] = True
    log_unseen_errors: Annotated[
        bool, Meta(description="say on stderr when a task failed and nobody got its error")
    ] = True
    detached_max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="largest sum of all detached objects, copies counted; 0: no limit",
        ),
    ] = 64 << 30
    detached_max_count: Annotated[
        int, Meta(ge=0, description="most detached objects; 0: no limit")
    ] = 1_000_000
    kv_value_max_bytes: Annotated[
        int, Meta(ge=1, description="largest value of a key; larger ones belong in stoker.put()")
    ] = 16 << 20
    kv_namespace_max_bytes: Annotated[
        int, Meta(ge=0, description="largest sum of the values of a namespace; 0: no limit")
    ] = 1 << 30
    kv_namespace_max_keys: Annotated[
        int, Meta(ge=0, description="most keys of a namespace; 0: no limit")
    ] = 1_000_000
    blobs_max_bytes: Annotated[
        int,
        Meta(ge=0, description="largest sum of all packages, and of all functions; 0: no limit"),
    ] = 20 << 30
    blobs_max_count: Annotated[
        int, Meta(ge=0, description="most packages, and most functions; 0: no limit")
    ] = 100_000
    keep_cache_s: Annotated[
        float,
        Meta(
            ge=0,
            description='how long results of cache="cluster" are kept; 0: until they are freed',
        ),
    ] = 7 * 86_400.0
    detached_dir: Annotated[
        str,
        Meta(
            description="where a node keeps detached objects with disk=True; unset: the session's folder"
        ),
    ] = ""
    lineage_max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="what a process keeps to make lost results again (calls and their arguments); "
            "the oldest goes first",
        ),
    ] = 256 << 20
    task_history: Annotated[bool, Meta(description="keep a record of every task in the gcs")] = True
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="URL of a collector of traces, as http://127.0.0.1:4318; empty: "
            "OTEL_EXPORTER_OTLP_ENDPOINT, or none (docs/tracing.md)"
        ),
    ] = ""
    faults: Annotated[
        str, Meta(description="requests that fail on purpose, by route (docs/faults.md)")
    ] = ""
    faults_seed: Annotated[int, Meta(description="seed by which those are drawn")] = 0

    keep_events: Annotated[
        int, Meta(ge=0, description="events kept, the newest of all; 0: all (docs/retention.md)")
    ] = 200_000
    snapshot_events: Annotated[
        int,
        Meta(
            ge=1,
            description="events between two snapshots of the state, at least (docs/time-machine.md)",
        ),
    ] = 5_000
    keep_tasks: Annotated[
        int, Meta(ge=0, description="attempts of tasks kept, the newest; 0: all")
    ] = 1_000_000
    keep_tasks_s: Annotated[
        float, Meta(ge=0, description="how long tasks are kept that have ended; 0: for ever")
    ] = 30 * 86_400.0
    keep_jobs_s: Annotated[
        float,
        Meta(ge=0, description="how long jobs are kept that have ended, with theirs; 0: for ever"),
    ] = 30 * 86_400.0
    keep_actors_s: Annotated[
        float, Meta(ge=0, description="how long dead actors are kept; 0: for ever")
    ] = 7 * 86_400.0
    keep_placement_groups_s: Annotated[
        float, Meta(ge=0, description="how long removed placement groups are kept; 0: for ever")
    ] = 7 * 86_400.0
    keep_nodes_s: Annotated[
        float, Meta(ge=0, description="how long dead nodes are kept; 0: for ever")
    ] = 86_400.0
    keep_blobs_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long functions and packages are kept that nothing uses; 0: for ever",
        ),
    ] = 30 * 86_400.0
    keep_environments_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a node keeps unpacked packages and venvs that no worker uses; 0: for ever",
        ),
    ] = 7 * 86_400.0
    environments_max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="size of those above which the ones used least recently go; 0: none",
        ),
    ] = 20 << 30
    package_max_bytes: Annotated[
        int, Meta(ge=1, description="size to which one package may unpack on a node")
    ] = 2 << 30
    log_max_bytes: Annotated[
        int,
        Meta(
            ge=0, description="size of a log file above which its oldest half is dropped; 0: none"
        ),
    ] = 256 << 20
    log_total_bytes: Annotated[
        int,
        Meta(
            ge=0, description="size of a node's logs above which those of ended workers go; 0: none"
        ),
    ] = 4 << 30
    log_max_files: Annotated[
        int, Meta(ge=0, description="logs of ended workers kept per node, the newest; 0: all")
    ] = 1000
    py_spy: Annotated[
        str,
        Meta(
            description="program for stacks and profiles: a name, a path, or off (docs/profiles.md)"
        ),
    ] = "py-spy"
    stack_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="how long the stacks of a process may take")
    ] = 1.0
    slow_task_stacks: Annotated[
        float,
        Meta(
            ge=0,
            description="a task that runs for so many times the p99 of its function has its stacks "
            "recorded; 0: off",
        ),
    ] = 0.0

    sources: dict[str, str] = {}
    """Where each value that is not a default came from; not a setting itself."""
    unknown: tuple[str, ...] = ()
    """``STOKER_*`` variables that name no setting; not a setting itself."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read ``environ`` (default: the process's), then ``overrides`` (None means "not given").

        Raises BadRequestError naming the variable and the fix; warns of unknown variables.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        hints = _hints()
        for name, hint in hints.items():
            variable = PREFIX + name.upper()
            text = environ.get(variable)
            if text:
                values[name] = parsed(variable, text, hint)
                sources[name] = variable
        for name, value in overrides.items():
            if name not in hints:
                raise UnknownOptionError(
                    f"there is no setting {name!r}\n{suggestion(name, hints)}", field=name
                )
            if value is not None:
                values[name] = converted(name, value, hints[name])
                sources[name] = "argument"
        check_words(values, sources)
        unknown = unknown_variables(environ, hints)
        return cls(**values, sources=sources, unknown=unknown)

    def describe(self) -> list[SettingInfo]:
        """Return name, value, source and meaning of every setting; the token and passwords are masked."""
        rows = []
        for name, hint in _hints().items():
            value = getattr(self, name)
            if name == "token" and value:
                text = "(set)"
            elif isinstance(value, (dict, tuple)):
                text = msgspec.json.encode(value).decode()
            else:
                text = "" if value is None else str(value)
            rows.append(
                SettingInfo(
                    name=name,
                    variable=PREFIX + name.upper(),
                    value=masked(text),
                    source=self.sources.get(name, DEFAULT),
                    meaning=meaning_of(hint),
                )
            )
        return rows


@cache
def _hints() -> dict[str, Any]:
    """Return the annotated type of every setting, by name."""
    hints = get_type_hints(Settings, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
