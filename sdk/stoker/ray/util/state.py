"""``ray.util.state``: lists of what is in the cluster, in Ray's shape, from the HTTP API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from stoker.exceptions import BadRequestError
from stoker.ray.mapping.lacking import attribute_error, warn_once
from stoker.runtime import current
from stoker_wire.messages.control import Page

Filter = tuple[str, str, Any]
_RENAMED = {
    "namespace": "ray_namespace",
    "attempt": "attempt_number",
    "error": "error_message",
    "entrypoint": "entrypoint",
    "hostname": "node_name",
    "group_id": "placement_group_id",
    "nbytes": "object_size",
    "resources": "resources_total",
}
_STATES = {
    "actors": {
        "PENDING": "PENDING_CREATION",
        "DEAD": "DEAD",
        "ALIVE": "ALIVE",
        "RESTARTING": "RESTARTING",
    },
    "tasks": {
        "PENDING": "PENDING_NODE_ASSIGNMENT",
        "QUEUED": "PENDING_NODE_ASSIGNMENT",
        "WAITING": "PENDING_ARGS_AVAIL",
        "SUBMITTED": "PENDING_NODE_ASSIGNMENT",
        "CANCELLED": "FAILED",
    },
    "nodes": {"DRAINING": "ALIVE"},
}


class Record(Mapping[str, Any]):
    """One of what is in the cluster: ``record.state`` or ``record["state"]``."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._fields.get(name)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Record({self._fields!r})"

    def asdict(self) -> dict[str, Any]:
        """Return the fields."""
        return dict(self._fields)


def _record(kind: str, item: Mapping[str, Any]) -> Record:
    fields = dict(item)
    for name, ray_name in _RENAMED.items():
        if name in fields:
            fields.setdefault(ray_name, fields[name])
    if "state" in fields:
        fields["state"] = _STATES.get(kind, {}).get(fields["state"], fields["state"])
    if kind == "tasks":
        fields["type"] = "ACTOR_TASK" if fields.get("actor_id") else "NORMAL_TASK"
        fields["func_or_class_name"] = fields.get("name")
        for name, ray_name in (("started_at_s", "start_time_ms"), ("ended_at_s", "end_time_ms")):
            at_s = fields.get(name)
            fields[ray_name] = None if not at_s else int(at_s * 1000)
    if kind == "jobs":
        fields["status"] = fields["state"]
        fields["submission_id"] = fields["job_id"]
    if kind == "nodes":
        fields["is_head_node"] = bool(item["labels"].get("stoker.io/head"))
        fields["node_ip"] = item["labels"].get("stoker.io/address", "")
    return Record(fields)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda have, want: _text(have) == _text(want),
    "!=": lambda have, want: _text(have) != _text(want),
}


def _text(value: Any) -> str:
    return str(value).lower()


def _listed(
    kind: str,
    path: str,
    filters: Sequence[Filter] | None,
    limit: int,
) -> list[Record]:
    for one in filters or ():
        if one[1] not in _OPERATORS:
            raise BadRequestError(
                f"filter {one!r}: give (name, '=' or '!=', value)", field="filters"
            )
    items = current.runtime().job.http.items(path, Page[dict[str, Any]])
    chosen = (
        record
        for record in (_record(kind, item) for item in items)
        if all(_OPERATORS[op](record.get(name), value) for name, op, value in filters or ())
    )
    return list(islice(chosen, limit))  # pages behind it are not asked for


def _lister(kind: str, path: str) -> Callable[..., list[Record]]:
    def lister(
        address: str | None = None,
        filters: Sequence[Filter] | None = None,
        limit: int = 100,
        timeout: int = 30,
        detail: bool = False,
        raise_on_missing_output: bool = True,
        **_options: Any,
    ) -> list[Record]:
        return _listed(kind, path, filters, limit)

    lister.__doc__ = f"Return the {kind} that all ``filters`` admit, ``limit`` of them at most."
    lister.__name__ = lister.__qualname__ = f"list_{kind}"
    return lister


list_actors = _lister("actors", "/v1/actors")
list_jobs = _lister("jobs", "/v1/jobs")
list_nodes = _lister("nodes", "/v1/nodes")
list_objects = _lister("objects", "/v1/objects")
list_placement_groups = _lister("placement_groups", "/v1/placement-groups")
list_workers = _lister("workers", "/v1/workers")
list_cluster_events = _lister("events", "/v1/events")
_list_tasks = _lister("tasks", "/v1/tasks")


def list_tasks(address: str | None = None, **options: Any) -> list[Record]:
    """Return the attempts of tasks that all ``filters`` admit, ``limit`` of them at most."""
    runtime = current.runtime()
    runtime.io.run(runtime.events.forward(), 30.0)
    return _list_tasks(address, **options)


def _getter(kind: str, lister: Callable[..., list[Record]], key: str) -> Callable[..., Any]:
    def getter(id: str, address: str | None = None, **_options: Any) -> Record | None:
        found = lister(filters=[(key, "=", id)], limit=1)
        return found[0] if found else None

    getter.__doc__ = f"Return one of the {kind} by its id, or None."
    getter.__name__ = getter.__qualname__ = f"get_{kind.removesuffix('s')}"
    return getter


get_actor = _getter("actors", list_actors, "actor_id")
get_job = _getter("jobs", list_jobs, "job_id")
get_node = _getter("nodes", list_nodes, "node_id")
get_placement_group = _getter("placement_groups", list_placement_groups, "placement_group_id")
get_task = _getter("tasks", list_tasks, "task_id")
get_worker = _getter("workers", list_workers, "worker_id")


def get_objects(id: str, **_options: Any) -> list[Record]:
    """Return what is known of an object."""
    return list_objects(filters=[("object_id", "=", id)])


def summarize_tasks(**_options: Any) -> dict[str, Any]:
    """Return the counts of tasks by name and state."""
    by_name: dict[str, Any] = {}
    for task in list_tasks(limit=1_000_000):
        entry = by_name.setdefault(
            task.name, {"func_or_class_name": task.name, "type": task.type, "state_counts": {}}
        )
        counts = entry["state_counts"]
        counts[task.state] = counts.get(task.state, 0) + 1
    return {"cluster": {"summary": by_name, "summary_by": "func_name"}}


def summarize_actors(**_options: Any) -> dict[str, Any]:
    """Return the counts of actors by class and state."""
    by_class: dict[str, Any] = {}
    for actor in list_actors(limit=1_000_000):
        entry = by_class.setdefault(
            actor.class_name, {"class_name": actor.class_name, "state_counts": {}}
        )
        counts = entry["state_counts"]
        counts[actor.state] = counts.get(actor.state, 0) + 1
    return {"cluster": {"summary": by_class, "summary_by": "class"}}


def summarize_objects(**_options: Any) -> dict[str, Any]:
    """Return how many objects there are."""
    objects = list_objects(limit=1_000_000)
    sizes = Counter(nbytes=sum(int(one.object_size or 0) for one in objects))
    return {"cluster": {"total_objects": len(objects), "total_size": sizes["nbytes"]}}


def list_logs(*_args: Any, **_options: Any) -> dict[str, Any]:
    """Warn that logs are asked for by task, actor or worker."""
    warn_once("ray.util.state.list_logs: logs are by task, actor or worker: `stoker logs ID`")
    return {}


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
