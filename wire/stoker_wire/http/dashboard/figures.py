"""Messages between the dashboard's page and the gcs: sessions, changes, and figures added up there."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.common import Message, Record, Role, Time

SESSION_PATH = "/v1/session"
LOGIN_LINKS_PATH = "/v1/login-links"


class Session(Record):
    """The session of a browser: whose it is, and what its requests that change something must carry.

    ``csrf`` goes into the header ``Stoker-CSRF``; ``expires_at_s`` is in Unix seconds.
    """

    user: str
    role: Role
    csrf: str
    expires_at_s: Time | None
    namespaces: tuple[str, ...] = ()


class LoginLink(Record):
    """A link that begins a session of whoever asked for it: ``path`` below the gcs's URL."""

    path: str
    expires_in_s: float


class ChangesQuery(Message):
    """From which sequence number on to tell of changes; -1 is the present one."""

    since: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = -1


class TaskSummaryQuery(Message):
    """Filters of the summary of tasks, and how many functions are shown: those with the most attempts."""

    job_id: str = ""
    name: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class Durations(Record):
    """Times of attempts in seconds: percentiles are within 9 %, ``max`` is a bound."""

    count: int = 0
    total: float = 0.0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class FunctionSummary(Record):
    """The attempts of a function: how many in each state and with which error, and how long they took.

    Attempts that retention has removed from the history are counted; the function of name ``(others)`` is
    what a job called by more than 1,000 names. ``cpu_s`` and ``gpu_s`` are the seconds that attempts ran
    times the CPUs and GPUs that they held, until now if they run.
    """

    key: str
    count: int
    states: dict[str, int]
    failures: dict[str, int]
    run_s: Durations
    wait_s: Durations
    cpu_s: float = 0.0
    gpu_s: float = 0.0


class TaskSummary(Record):
    """The functions with the most attempts.

    ``total`` is how many there are; ``states``, ``cpu_s`` and ``gpu_s`` are of all of them.
    """

    items: tuple[FunctionSummary, ...]
    states: dict[str, int]
    total: int
    cpu_s: float = 0.0
    gpu_s: float = 0.0


class CostPart(Record):
    """The cost of a part of a job: its driver, an actor, a placement group, or the tasks of a function.

    ``cpu_s`` and ``gpu_s`` are seconds times CPUs and GPUs. ``group_cpu_s`` and ``group_gpu_s`` are what of
    these was within placement groups, which count by themselves.
    """

    kind: str
    id: str
    name: str
    cpu_s: float
    gpu_s: float
    group_cpu_s: float = 0.0
    group_gpu_s: float = 0.0


class JobCost(Record):
    """The cost of a job until now, and of its parts.

    ``cpu_s`` and ``gpu_s`` count once what is held within a placement group. ``complete`` is false if it has
    more parts than are counted.
    """

    job_id: str
    cpu_s: float
    gpu_s: float
    parts: tuple[CostPart, ...]
    complete: bool = True


class UsageQuery(Message):
    """A range of time in Unix seconds (0: to the present), and about how many points it may have."""

    since_s: Time = 0.0
    until_s: Time = 0.0
    points: Annotated[int, msgspec.Meta(ge=2, le=2000)] = 300


class UsageSample(Record):
    """The use of the cluster at a moment, or in the mean over a step; None: nobody could say.

    ``cpu`` and ``gpu`` count what leases hold; ``gpu_utilisation`` (0 to 1) and memory are measured.
    ``tasks_finished`` and ``tasks_failed`` are attempts that ended in the step.
    """

    cpu_used: float | None = None
    cpu_total: float | None = None
    gpu_used: float | None = None
    gpu_total: float | None = None
    gpu_utilisation: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    waiting: float | None = None
    tasks_running: float | None = None
    tasks_finished: float | None = None
    tasks_failed: float | None = None
    node_count: float | None = None


class Usage(Record):
    """Samples of the use of the cluster: a value of each series for each of ``at_s``, ``step_s`` apart."""

    step_s: int
    at_s: tuple[float, ...]
    series: dict[str, tuple[float | None, ...]]


class ResourceUse(Record):
    """A resource of all living nodes: how much there is, and how much leases hold."""

    total: float
    used: float


class GpuUse(Record):
    """The GPUs of all living nodes; utilisation is 0 to 1, None where none is measured."""

    count: int = 0
    used: float = 0.0
    utilisation: float | None = None
    memory_used_bytes: float = 0.0
    memory_total_bytes: float = 0.0


class WaitingDemand(Record):
    """Work of a job that waits for one cause; ``since_s`` is Unix seconds."""

    job_id: str
    name: str
    queue: str
    count: int
    resources: dict[str, float]
    since_s: float
    cause: str = ""
    remedy: str = ""
    infeasible: bool = False


class Failure(Record):
    """A failure of a job, an actor, a node, or of ``count`` attempts that failed alike."""

    kind: str
    id: str
    job_id: str
    name: str
    at_s: float
    code: str
    message: str
    count: int = 1


class Overview(Record):
    """The cluster at a glance; counts are by state. ``missing`` says what could not be asked, and why."""

    seq: int
    at_s: float
    nodes: dict[str, int]
    resources: dict[str, ResourceUse]
    gpus: GpuUse
    jobs: dict[str, int]
    actors: dict[str, int]
    groups: dict[str, int]
    tasks: dict[str, int]
    waiting: tuple[WaitingDemand, ...]
    failures: tuple[Failure, ...]
    missing: str = ""


class TimelineQuery(Message):
    """Whose attempts, in which range of time (Unix seconds; 0: from the first, to the last), how fine.

    ``cursor`` is that of the page before: a page has up to ``lane_limit`` lanes.
    """

    job_id: str = ""
    actor_id: str = ""
    node_id: str = ""
    from_s: Time = 0.0
    to_s: Time = 0.0
    buckets: Annotated[int, msgspec.Meta(ge=10, le=2000)] = 600
    lane_limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100
    cursor: Annotated[str, msgspec.Meta(max_length=300)] = ""


class Lane(Record):
    """The lane of a worker: its attempts, or, where these are many, which part of each bucket it was busy.

    A span is (start, end, index of its name, index of its state, task id, attempt). ``name`` is that of the
    actor, or its class.
    """

    node_id: str
    worker_id: str
    actor_id: str
    count: int
    name: str = ""
    spans: tuple[tuple[float, float, int, int, str, int], ...] | None = None
    busy: tuple[float, ...] | None = None


class Timeline(Record):
    """The lanes of workers over a range of time, by node; ``first_s`` and ``last_s`` bound all that there is.

    ``hostnames`` are those of the nodes that are known.
    """

    from_s: float
    to_s: float
    bucket_s: float
    first_s: float
    last_s: float
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    states: tuple[str, ...]
    next_cursor: str = ""
    hostnames: dict[str, str] = {}
