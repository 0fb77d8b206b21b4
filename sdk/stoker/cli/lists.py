"""``stoker list`` and ``stoker get``: any table of the cluster, as people or programs want it.

Records are read as plain mappings, so that fields of a newer server are shown too (``--json``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from stoker.cli.options import cluster_options, http_client, pairs
from stoker.cli.output import Row, ago, clock, duration, nbytes, print_json, print_table, resources
from stoker_wire.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker._http import HttpClient


class _Page(msgspec.Struct):
    items: list[Row]
    next_cursor: str = ""


class _Table(msgspec.Struct):
    """A list: where it is, its columns, and what its rows are called."""

    path: str
    help: str
    columns: dict[str, Any]
    empty: str


def _gpus(row: Row) -> str:
    names = [device["name"] for device in row.get("devices") or ()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "-"


def _error(row: Row) -> str:
    error = row.get("error") or row.get("death_cause")
    first: str = (error or {}).get("message", "").partition("\n")[0]
    return first if len(first) <= 80 else first[:79] + "…"


def _took(row: Row) -> str:
    start, end = row.get("started_at_s"), row.get("ended_at_s")
    return duration(end - start) if start and end else ""


TABLES = {
    "nodes": _Table(
        "/v1/nodes",
        "Machines, alive and dead.",
        {
            "node": "node_id", "state": "state", "host": "hostname", "url": "url",
            "resources": lambda row: resources(row["resources"]), "gpus": _gpus,
            "heartbeat": lambda row: ago(row.get("heartbeat_at_s")),
        },
        "no nodes",
    ),
    "jobs": _Table(
        "/v1/jobs",
        "Driver programs, submitted and attached ones.",
        {
            "job": "job_id", "state": "state", "name": "name", "entrypoint": "entrypoint",
            "created": lambda row: ago(row.get("created_at_s")), "took": _took, "code": "exit_code",
        },
        "no jobs",
    ),
    "tasks": _Table(
        "/v1/tasks",
        "Attempts of tasks, from the history.",
        {
            "task": "task_id", "try": "attempt", "state": "state", "name": "name", "job": "job_id",
            "node": "node_id", "submitted": lambda row: ago(row.get("submitted_at_s")),
            "took": _took, "error": _error,
        },
        "no tasks",
    ),
    "actors": _Table(
        "/v1/actors",
        "Actors, alive and dead.",
        {
            "actor": "actor_id", "state": "state", "class": "class_name", "name": "name",
            "job": "job_id", "node": "node_id", "pid": "pid", "restarts": "restarts",
            "error": _error,
        },
        "no actors",
    ),
    "objects": _Table(
        "/v1/objects",
        "Objects in the nodes' shared memory (small ones are not listed).",
        {
            "object": "object_id", "size": lambda row: nbytes(row["nbytes"]), "node": "node_id",
            "job": "job_id", "owner": "owner_id",
            "created": lambda row: ago(row.get("created_at_s")),
        },
        "no objects in shared memory",
    ),
    "leases": _Table(
        "/v1/leases",
        "Who uses which worker with which resources.",
        {
            "lease": "lease_id", "kind": "kind", "job": "job_id", "node": "node_id",
            "resources": lambda row: resources(row.get("resources")),
            "gpus": lambda row: ",".join(map(str, row.get("gpus") or {})),
            "owner": "owner_id", "granted": lambda row: ago(row.get("granted_at_s")),
        },
        "no leases",
    ),
    "workers": _Table(
        "/v1/workers",
        "Worker processes of all nodes.",
        {
            "worker": "worker_id", "state": "state", "node": "node_id", "pid": "pid",
            "job": "job_id", "actor": "actor_id",
            "memory": lambda row: nbytes(row.get("rss_bytes", 0)),
            "started": lambda row: ago(row.get("started_at_s")),
        },
        "no workers",
    ),
    "events": _Table(
        "/v1/events",
        "The log of all that happened.",
        {"seq": "seq", "at": lambda row: clock(row["at_s"]), "kind": "kind", "subject": "subject"},
        "no events",
    ),
}  # fmt: skip

# Prefix of an id -> the list that it is in.
KINDS = {"n": "nodes", "job": "jobs", "t": "tasks", "a": "actors"}


@click.group("list")
def list_group() -> None:
    """List nodes, jobs, tasks, actors, objects, leases, workers or events."""


def _list(
    name: str,
    limit: int,
    filters: tuple[str, ...],
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    table = TABLES[name]
    rows = fetch(http_client(address, token), table.path, limit, pairs(filters, "--filter"))
    # Pages come in the order of ids; people read time from top to bottom.
    rows.sort(key=lambda row: row.get("created_at_s") or row.get("submitted_at_s") or 0.0)
    if as_json:
        print_json(rows)
    else:
        print_table(rows, table.columns, empty=table.empty)


def fetch(
    client: HttpClient, path: str, limit: int, query: Mapping[str, object] | None = None
) -> list[Row]:
    """Return up to ``limit`` rows of a paged list."""
    found: list[Row] = []
    cursor = ""
    while len(found) < limit:
        page = client.call(
            "GET",
            path,
            reply=_Page,
            query={
                **(query or {}),
                "limit": min(limit - len(found), 1000),
                "cursor": cursor or None,
            },
        )
        found += page.items
        cursor = page.next_cursor
        if not cursor:
            break
    return found


def _add(name: str) -> None:
    def command(**options: Any) -> None:
        _list(name, **options)

    decorated: Callable[..., None] = cluster_options(command)
    decorated = click.option(
        "--filter", "filters", multiple=True, metavar="FIELD=VALUE",
        help="Only rows with this, such as state=RUNNING; repeatable.",
    )(decorated)  # fmt: skip
    decorated = click.option(
        "--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many."
    )(decorated)
    list_group.command(name, help=TABLES[name].help)(decorated)


for _name in TABLES:
    _add(_name)


@click.command()
@cluster_options
@click.argument("id_", metavar="ID")
def get(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Show everything known of one node, job, task or actor (its id says which)."""
    row = http_client(address, token).call("GET", path_of(id_), reply=dict[str, Any])
    if as_json:
        print_json(row)
        return
    width = max(map(len, row))
    for name, value in row.items():
        if value not in (None, "", {}, []):
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            if name.endswith("_at_s"):
                text = f"{clock(value)} ({ago(value)})"
            click.echo(f"{name:<{width}}  {text}")


def path_of(id_: str) -> str:
    """Return where the record of an id is; BadRequestError for ids that have none."""
    kind = KINDS.get(id_.partition("_")[0])
    if kind is None or "_" not in id_:
        raise BadRequestError(
            f"{id_!r} is no id of a node (n_...), job (job_...), task (t_...) or actor (a_...)"
        )
    return f"/v1/{kind}/{id_}"
