"""The inputs of a simulation: a trace of jobs (CSV) and a cluster (TOML).

Columns of a trace; those with a default may be missing:

============  ==========  ====================================================================
column        default     meaning
============  ==========  ====================================================================
job_id                    a name that is unique in the trace
submit_s                  when it is submitted, seconds from the start of the trace
duration_s                how long each of its tasks runs
tasks         1           how many equal tasks it has
gang          0           1: all tasks start together, or none (a placement group that packs)
cpus          1           CPUs of each task
gpus          0           GPUs of each task, a fraction or a whole number
memory        0           memory of each task in bytes, or as 64GiB
queue         default     the queue in which it waits
user          (empty)     whose it is
priority      0           its priority in the queue
============  ==========  ====================================================================

A cluster has tables of equal nodes, and queues as ``stoker queue apply`` takes them::

    [[nodes]]
    count = 125
    resources = {CPU = 64, GPU = 8, memory = "512GiB"}
    labels = {rack = "r1"}

    [queues.research]
    weight = 3
    quota = {GPU = 500}
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.model.nodes import NodeSpec, make_node_spec
from stoker_scheduler.core.model.queues import DEFAULT_QUEUE, QueueSpec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.resources import InvalidDemandError, to_units
from stoker_wire.amounts import parse_amount
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from pathlib import Path

_LIMITS = ("quota", "limit", "user_limit", "job_limit")
_QUEUE_FIELDS = (*_LIMITS, "parent", "weight", "rate_limit", "stopped", "policy")


class InputError(ValueError):
    """A trace or cluster that cannot be read; the text names the file, the place and the fix."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One row of a trace; ``requirements`` are those of each of its ``tasks``."""

    job_id: str
    submit_s: float
    duration_s: float
    tasks: int
    gang: bool
    requirements: Requirements
    queue: str
    user: str
    priority: int
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes and queues of a simulation."""

    nodes: tuple[NodeSpec, ...]
    queues: tuple[QueueSpec, ...]


def _non_negative(text: str) -> float:
    value = parse_amount(text)
    if not 0 <= value < math.inf:
        raise ValueError("it must be 0 or more")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be 1 or more")
    return value


_COLUMNS: Mapping[str, tuple[Callable[[str], Any], Any]] = {
    "job_id": (str, None),
    "submit_s": (_non_negative, None),
    "duration_s": (_non_negative, None),
    "tasks": (_positive_int, 1),
    "gang": (lambda text: bool(int(text)), False),
    "cpus": (_non_negative, 1.0),
    "gpus": (_non_negative, 0.0),
    "memory": (_non_negative, 0.0),
    "queue": (str, DEFAULT_QUEUE),
    "user": (str, ""),
    "priority": (int, 0),
    "preemptible": (lambda text: bool(int(text)), False),
    "background": (lambda text: bool(int(text)), False),
}
"""Column -> how it is read, and its default (None: it must be there)."""


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a trace in the order of their submission; InputError for a row that is wrong."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        _check_columns(path, reader.fieldnames or ())
        jobs = [_job_of(path, number, row) for number, row in enumerate(reader, start=2)]
    if not jobs:
        raise InputError(f"{path}: there is no job\nwrite one line for each, below the columns")
    seen: dict[str, None] = {}
    for job in jobs:
        if job.job_id in seen:
            raise InputError(f"{path}: job_id {job.job_id!r} is there twice")
        seen[job.job_id] = None
    return sorted(jobs, key=lambda job: job.submit_s)


def _check_columns(path: Path, columns: Iterator[str] | Any) -> None:
    for name in columns:
        if name not in _COLUMNS:
            raise InputError(f"{path}: column {name!r} is unknown\n{suggestion(name, _COLUMNS)}")
    missing = [n for n, (_, default) in _COLUMNS.items() if default is None and n not in columns]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing")


def _job_of(path: Path, line: int, row: Mapping[str, str | None]) -> TraceJob:
    values: dict[str, Any] = {}
    for name, (read, default) in _COLUMNS.items():
        text = row.get(name)
        if text is None or text == "":
            if default is None:
                raise InputError(f"{path}:{line}: {name} is empty")
            values[name] = default
            continue
        try:
            values[name] = read(text)
        except ValueError as error:
            raise InputError(f"{path}:{line}: {name}={text!r}: {error}") from None
    asked = {"CPU": values.pop("cpus"), "GPU": values.pop("gpus"), "memory": values.pop("memory")}
    background = values.pop("background")
    if background and values["gang"] and values["tasks"] > 1:
        raise InputError(f"{path}:{line}: background=1: a gang cannot be background work")
    try:
        requirements = make_requirements(
            {n: units for n, units in asked.items() if units}, background=background
        )
    except InvalidDemandError as error:
        raise InputError(f"{path}:{line}: {error}") from None
    return TraceJob(requirements=requirements, **values)


def read_cluster(path: Path) -> Cluster:
    """Return the nodes and queues of a cluster; InputError for what is wrong in it."""
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: {error}") from None
    for name in content:
        if name not in ("nodes", "queues"):
            raise InputError(f"{path}: {name!r} is unknown\nthere are [[nodes]] and [queues.NAME]")
    nodes: list[NodeSpec] = []
    for index, table in enumerate(content.get("nodes", ())):
        try:
            nodes += _nodes_of(table, first=len(nodes))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path}: [[nodes]] number {index + 1}: {what}") from None
    if not nodes:
        raise InputError(f"{path}: there is no node\nadd [[nodes]] with count and resources")
    queues = []
    for name, table in content.get("queues", {}).items():
        try:
            queues.append(queue_of(name, table))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: queue {name!r}: {error}") from None
    _check_parents(path, queues)
    return Cluster(tuple(nodes), tuple(queues))


def _nodes_of(table: Mapping[str, Any], *, first: int) -> list[NodeSpec]:
    for name in table:
        if name not in ("count", "resources", "labels"):
            raise ValueError(f"{name!r} is unknown: there are count, resources and labels")
    resources = {name: parse_amount(value) for name, value in table["resources"].items()}
    labels = {str(name): str(value) for name, value in table.get("labels", {}).items()}
    return [
        make_node_spec(f"n_{first + index:05}", resources, labels=labels)
        for index in range(int(table.get("count", 1)))
    ]


def queue_of(name: str, table: Mapping[str, Any]) -> QueueSpec:
    """Return a queue of a cluster file; ValueError for a setting that there is not, or no amount."""
    settings: dict[str, Any] = {}
    for field, value in table.items():
        if field not in _QUEUE_FIELDS:
            raise ValueError(f"{field!r} is unknown: {suggestion(field, _QUEUE_FIELDS)}")
        if field in _LIMITS:
            amounts = {resource: parse_amount(one) for resource, one in value.items()}
            units = to_units(amounts)
            value = {resource: units.get(resource, 0) for resource in sorted(amounts)}
        settings[field] = value
    if settings.get("weight", 1) <= 0:
        raise ValueError("weight must be more than 0")
    return QueueSpec(name=name, **settings)


def _check_parents(path: Path, queues: list[QueueSpec]) -> None:
    tree = {queue.name: queue for queue in queues}
    for queue in queues:
        above = [queue.name]
        parent = queue.parent
        while parent:
            if parent not in tree:
                raise InputError(f"{path}: queue {above[-1]!r}: there is no parent {parent!r}")
            if parent in above:
                raise InputError(f"{path}: a queue cannot be below itself: {' -> '.join(above)}")
            above.append(parent)
            parent = tree[parent].parent
