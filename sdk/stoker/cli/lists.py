"""``stoker list`` and ``stoker get``: any table of the cluster, as people or programs want it.

Records are read as plain mappings, so that fields of a newer server are shown too (``--json``). The
newest rows come first, in the order that the server gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stoker.cli.ids import STEMS, Id, known_ids, resolve_id
from stoker.cli.options import cluster_options, http_client, pairs
from stoker.cli.output import (
    ago,
    clock,
    duration,
    echo,
    nbytes,
    plural,
    print_json,
    print_table,
    resources,
)
from stoker.cli.tables import Column, Row
from stoker_wire.errors import BadRequestError
from stoker_wire.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.shell_completion import CompletionItem

    from stoker.runtime.net.http import HttpClient

    _StrType = click.ParamType[str]
else:
    _StrType = click.ParamType  # generic only in newer versions of click

NEWEST_FIRST = {"sort": "created", "order": "desc"}
_MOST = 1000


class Listing(msgspec.Struct):
    """Rows of a list, and how many there are in all (None: the server does not know)."""

    items: list[Row]
    next_cursor: str = ""
    total: int | None = None
    total_exact: bool = True


@dataclass(frozen=True, slots=True)
class _Table:
    """A list: where it is, its columns, what it can be filtered by, and what its rows are called.

    ``usual`` are filters that hold unless ``--all`` or a filter of the same field is given.
    """

    path: str
    help: str
    columns: tuple[Column, ...]
    filters: tuple[str, ...]
    empty: str
    states: tuple[str, ...] = ()
    usual: tuple[tuple[str, str], ...] = ()


def node_state(row: Row) -> str:
    """Return the state of a node, and under which conditions it takes no new work."""
    return ", ".join((row["state"], *(one["kind"] for one in row.get("conditions") or ())))


def gpus_of(row: Row) -> str:
    """Return the GPUs of a node as ``2 x NVIDIA H100 (1 quarantined)``; a dash for none."""
    devices = row.get("devices") or ()
    names = [device["name"] for device in devices]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "-"
    out = sum(1 for device in devices if device.get("quarantine"))
    return f"{text} ({out} quarantined)" if out else text


def _error(row: Row) -> str:
    error = row.get("error") or (row.get("state") != "ALIVE" and row.get("death_cause"))
    first: str = (error or {}).get("message", "").partition("\n")[0]
    return first


def _took(row: Row) -> str:
    start, end = row.get("started_at_s"), row.get("ended_at_s")
    return duration(end - start) if start and end else ""


def _attempt(job: Row) -> str:
    preempted = sum(bool(one.get("preempted")) for one in job.get("attempts", ()))
    most = job.get("retries", 0) + 1 + preempted
    return f"{job['attempt']}/{most}" if most > 1 else ""


def _since(name: str) -> Callable[[Row], str]:
    return lambda row: ago(row.get(name))


def _bundles(row: Row) -> str:
    """Return the bundles of a group as ``8 x {1 CPU, 1 GPU}``."""
    texts = [f"{{{resources(bundle['resources'])}}}" for bundle in row.get("bundles") or ()]
    return ", ".join(
        f"{texts.count(text)} x {text}" if texts.count(text) > 1 else text
        for text in dict.fromkeys(texts)
    )


def _placed(row: Row) -> str:
    return f"{len(row.get('placements') or ())} of {len(row.get('bundles') or ())}"


TABLES = {
    "nodes": _Table(
        "/v1/nodes",
        "Machines that are alive; with --all or --filter state=DEAD also those that are gone.",
        (
            Column("node", "node_id"),
            Column("state", node_state),
            Column("host", "hostname", drop=2, shrink=12),
            Column("resources", lambda row: resources(row["resources"]), drop=1, shrink=20),
            Column("gpus", gpus_of, drop=3, shrink=14),
            Column("heartbeat", _since("heartbeat_at_s"), drop=4),
            Column("url", "url", drop=5),
        ),
        ("state",),
        "no nodes",
        ("ALIVE", "SUSPECT", "DEAD"),
        (("state", "ALIVE,SUSPECT"),),
    ),
    "jobs": _Table(
        "/v1/jobs",
        "Driver programs, submitted and attached ones.",
        (
            Column("job", "job_id"),
            Column("state", "state"),
            Column("name", "name", drop=4, shrink=12),
            Column("entrypoint", "entrypoint", drop=2, shrink=20),
            Column("created", _since("created_at_s"), drop=3),
            Column("took", _took, drop=5),
            Column("queue", "queue", drop=6),
            Column("user", "user", drop=7),
            Column("attempt", _attempt, drop=8),
            Column("code", "exit_code", drop=1),
        ),
        ("state", "namespace", "schedule"),
        "no jobs",
        ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"),
    ),
    "tasks": _Table(
        "/v1/tasks",
        "Attempts of tasks, from the history.",
        (
            Column("task", "task_id"),
            Column("try", "attempt", drop=5),
            Column("state", "state"),
            Column("name", "name", drop=1, shrink=12),
            Column("submitted", _since("submitted_at_s"), drop=4),
            Column("took", _took, drop=3),
            Column("error", _error, drop=2, shrink=16),
            Column("node", "node_id", drop=6),
            Column("job", "job_id", drop=7),
        ),
        ("job_id", "state", "name", "node_id", "actor_id"),
        "no tasks",
        ("WAITING", "QUEUED", "RUNNING", "FINISHED", "FAILED", "CANCELLED"),
    ),
    "actors": _Table(
        "/v1/actors",
        "Actors, alive and dead.",
        (
            Column("actor", "actor_id"),
            Column("state", "state"),
            Column("class", "class_name", drop=1, shrink=10),
            Column("name", "name", drop=4, shrink=10),
            Column("pid", lambda row: str(row.get("pid") or ""), drop=5),
            Column("restarts", "restarts", drop=3),
            Column("error", _error, drop=2, shrink=16),
            Column("node", "node_id", drop=6),
            Column("job", "job_id", drop=7),
        ),
        ("job_id", "state", "name", "namespace", "node_id", "class_name"),
        "no actors",
        ("PENDING", "ALIVE", "RESTARTING", "DEAD"),
    ),
    "placement-groups": _Table(
        "/v1/placement-groups",
        "Placement groups: resources reserved together; with --all also removed ones.",
        (
            Column("group", "group_id"),
            Column("state", "state"),
            Column("name", "name", drop=3, shrink=10),
            Column("strategy", "strategy", drop=2),
            Column("bundles", _bundles, drop=1, shrink=20),
            Column("placed", _placed, drop=4),
            Column("created", _since("created_at_s"), drop=5),
            Column("reason", "reason", drop=6, shrink=16),
            Column("job", "job_id", drop=7),
        ),
        ("job_id", "state", "name", "namespace"),
        "no placement groups",
        ("PENDING", "CREATED", "RESCHEDULING", "REMOVED"),
        (("state", "PENDING,CREATED,RESCHEDULING"),),
    ),
    "objects": _Table(
        "/v1/objects",
        "Objects in the nodes' shared memory (small ones are not listed).",
        (
            Column("object", "object_id"),
            Column("size", lambda row: nbytes(row["nbytes"])),
            Column("created", _since("created_at_s"), drop=1),
            Column("node", "node_id", drop=2),
            Column("job", "job_id", drop=3),
            Column("owner", "owner_id", drop=4),
        ),
        ("node_id", "job_id"),
        "no objects in shared memory",
    ),
    "detached-objects": _Table(
        "/v1/detached-objects",
        "Objects that outlive the process that made them, until stoker.free().",
        (
            Column("object", "object_id"),
            Column("state", "state"),
            Column("name", "name", drop=1, shrink=12),
            Column("size", lambda row: nbytes(row["nbytes"])),
            Column("nodes", lambda row: "gcs" if row["inline"] else str(len(row["nodes"])), drop=4),
            Column("namespace", "namespace", drop=3, shrink=12),
            Column("created", _since("created_at_s"), drop=2),
            Column("job", "job_id", drop=5),
        ),
        ("job_id", "state", "name", "namespace"),
        "no detached objects",
        ("CREATING", "READY", "LOST"),
    ),
    "leases": _Table(
        "/v1/leases",
        "Who uses which worker with which resources.",
        (
            Column("lease", "lease_id"),
            Column("kind", "kind", drop=3),
            Column("resources", lambda row: resources(row.get("resources")), drop=1, shrink=14),
            Column("gpus", lambda row: ",".join(map(str, row.get("gpus") or {})), drop=5),
            Column("granted", _since("granted_at_s"), drop=4),
            Column("node", "node_id", drop=2),
            Column("job", "job_id", drop=6),
            Column("owner", "owner_id", drop=7),
        ),
        ("job_id", "owner_id", "node_id"),
        "no leases",
    ),
    "workers": _Table(
        "/v1/workers",
        "Worker processes of all nodes.",
        (
            Column("worker", "worker_id"),
            Column("state", "state"),
            Column("pid", "pid", drop=2),
            Column("memory", lambda row: nbytes(row.get("rss_bytes", 0)), drop=1),
            Column("started", _since("started_at_s"), drop=4),
            Column("node", "node_id", drop=3),
            Column("job", "job_id", drop=5),
            Column("actor", "actor_id", drop=6),
        ),
        ("node_id", "job_id", "actor_id", "state"),
        "no workers",
        ("STARTING", "IDLE", "LEASED", "DEAD"),
    ),
    "events": _Table(
        "/v1/events",
        "The log of all that happened. Filters by kind and subject match beginnings.",
        (
            Column("seq", "seq", drop=2),
            Column("at", lambda row: clock(row["at_s"]), drop=1),
            Column("kind", "kind"),
            Column("subject", "subject"),
            Column("by", lambda row: (row.get("by") or {}).get("name") or "-", drop=3),
        ),
        ("kind", "subject", "by"),
        "no events",
    ),
}

_HIDDEN = {"nodes": "nodes that are dead", "placement-groups": "groups that were removed"}

# Prefix of an id -> the list that it is in.
KINDS = {"n": "nodes", "job": "jobs", "t": "tasks", "a": "actors", "pg": "placement-groups"}


@click.group("list")
def list_group() -> None:
    """List nodes, jobs, tasks, actors, groups, objects, leases, workers, events.

    The newest come first.
    A terminal shows the columns that fit (ids are never cut); a pipe, --wide and --json show all.
    """


class Filter(_StrType):
    """Argument type: ``FIELD=VALUE`` of a table, completed by the shell."""

    name = "filter"

    def __init__(self, table: str) -> None:
        self._table = table

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return fields, states, or ids of the cluster."""
        from click.shell_completion import CompletionItem

        table = TABLES[self._table]
        field, sign, value = incomplete.partition("=")
        if not sign:
            names = [name for name in table.filters if name.startswith(field)]
            return [CompletionItem(f"{name}=") for name in names]
        kind = field.removesuffix("_id")
        known: list[str] = []
        if field == "state":
            states = [state.lower() for state in table.states] if value.islower() else table.states
            known = [state for state in states if state.startswith(value)]
        elif kind in STEMS:
            known = [match.id for match in known_ids(ctx, value, (kind,))]
        return [CompletionItem(f"{field}={one}") for one in known]


def checked_filters(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return filters as the server names them; a usage error lists what there is.

    A field may be called as its column is (``job`` for ``job_id``), a state in small letters.
    """
    table = TABLES[name]
    checked = {}
    for field, value in given.items():
        known = _field(table, field)
        if known is None:
            raise click.BadParameter(_no_filter(name, table, field), param_hint="--filter")
        if known == "state" and table.states:
            value = value.upper()
            for one in value.split(","):
                if one not in table.states:
                    close = nearest(one, table.states)
                    hint = f"did you mean {close}?" if close else ""
                    hint = hint or f"there are {', '.join(table.states)}"
                    raise click.BadParameter(
                        f"{one!r} is no state of {name}; {hint}", param_hint="--filter"
                    )
        checked[known] = value
    return checked


def _field(table: _Table, named: str) -> str | None:
    for column in table.columns:
        if named.lower() == column.heading and isinstance(column.source, str):
            named = column.source
    if named in table.filters:
        return named
    return f"{named}_id" if f"{named}_id" in table.filters else None


def _no_filter(name: str, table: _Table, field: str) -> str:
    close = nearest(field, table.filters)
    shown = any(field.lower() in (column.heading, column.source) for column in table.columns)
    if shown:
        message = f"{name} cannot be filtered by {field!r}"
    else:
        message = f"{name} have no {field!r}" + (f", did you mean {close!r}?" if close else "")
    return f"{message} (filters of {name}: {', '.join(table.filters)})"


def _list(
    name: str,
    limit: int,
    everything: bool,
    wide: bool,
    filters: tuple[str, ...],
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    table = TABLES[name]
    query = checked_filters(name, pairs(filters, "--filter"))
    client = http_client(address, token)
    for field, value in query.items():
        if field.removesuffix("_id") in STEMS:
            query[field] = resolve_id(client, value)
    hidden = {} if everything else {k: v for k, v in table.usual if k not in query}
    page = fetch_newest(client, table.path, None if everything else limit, {**hidden, **query})
    if as_json:
        print_json(page.items)
        return
    left_out = print_table(page.items, table.columns, empty=table.empty, wide=wide)
    for line in _footer(client, name, page, left_out, hidden):
        echo(line, err=True)


def _footer(
    client: HttpClient,
    name: str,
    page: Listing,
    left_out: tuple[str, ...],
    hidden: Mapping[str, str],
) -> list[str]:
    """Return lines on what is not shown, and how to see it."""
    lines = []
    if page.next_cursor:
        of = "" if page.total is None else f" of {page.total}{'' if page.total_exact else '+'}"
        lines.append(f"{len(page.items)}{of} {name}, the newest first; more: --limit N, or --all")
    if name == "nodes" and hidden:
        dead = fetch_newest(client, "/v1/nodes", 1, {"state": "DEAD"})
        if dead.total:
            lines.append(
                f"{plural(dead.total, 'dead node')} not shown; see: stoker list nodes --all"
            )
    if left_out:
        lines.append(f"left out at this width: {', '.join(left_out)}; all columns: --wide")
    return lines


def fetch_newest(
    client: HttpClient, path: str, limit: int | None, query: Mapping[str, object]
) -> Listing:
    """Return up to ``limit`` rows (None: all), the newest first, and how many there are in all."""
    asked = {**query, **NEWEST_FIRST, "count": True}
    rows: list[Row] = []
    read = Listing([])
    while limit is None or len(rows) < limit:
        size = _MOST if limit is None else min(limit - len(rows), _MOST)
        page = client.call(
            "GET",
            path,
            reply=Listing,
            query={**asked, "limit": size, "cursor": read.next_cursor or None},
        )
        rows += page.items
        if not asked.pop("count", False):
            page.total, page.total_exact = read.total, read.total_exact
        read = page
        if not page.next_cursor:
            break
    read.items = rows
    return read


def fetch(
    client: HttpClient, path: str, limit: int, query: Mapping[str, object] | None = None
) -> list[Row]:
    """Return up to ``limit`` rows of a paged list, in the order of their ids."""
    rows: list[Row] = []
    cursor = ""
    while len(rows) < limit:
        size = min(limit - len(rows), _MOST)
        asked = {**(query or {}), "limit": size, "cursor": cursor or None}
        page = client.call("GET", path, reply=Listing, query=asked)
        rows += page.items
        cursor = page.next_cursor
        if not cursor:
            break
    return rows


def _add(name: str) -> None:
    def command(**options: Any) -> None:
        _list(name, **options)

    table = TABLES[name]
    decorated: Callable[..., None] = cluster_options(command)
    decorated = click.option(
        "--filter", "filters", multiple=True, metavar="FIELD=VALUE", type=Filter(name),
        help=f"Only rows with this; repeatable. Fields: {', '.join(table.filters)}."
        + (f" States: {', '.join(table.states)}." if table.states else ""),
    )(decorated)  # fmt: skip
    decorated = click.option(
        "--wide", is_flag=True, help="All columns, however wide the terminal is."
    )(decorated)
    also = f", also {_HIDDEN[name]}" if table.usual else ""
    decorated = click.option(
        "--all", "everything", is_flag=True, help=f"All rows, whatever --limit says{also}."
    )(decorated)
    decorated = click.option(
        "--limit", type=click.IntRange(1), default=100, show_default=True,
        help="At most so many, the newest.",
    )(decorated)  # fmt: skip
    columns = ", ".join(column.heading.upper() for column in table.columns)
    text = f"{table.help}\n\nThe newest first. Columns, where there is room: {columns}."
    list_group.command(name, help=text, short_help=table.help)(decorated)


for _name in TABLES:
    _add(_name)


@click.command()
@cluster_options
@click.argument("id_", metavar="ID", type=Id("node", "job", "task", "actor", "placement group"))
def get(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Show everything known of a node, job, task, actor or placement group (its id says which).

    The beginning of an id will do if no other begins so.
    """
    path_of(id_)
    client = http_client(address, token)
    row = client.call("GET", path_of(resolve_id(client, id_)), reply=dict[str, Any])
    if as_json:
        print_json(row)
        return
    width = max(map(len, row))
    for name, value in row.items():
        if value not in (None, "", {}, []):
            text = value if isinstance(value, str) else _text(value, width)
            if name.endswith("_at_s"):
                text = f"{clock(value)} ({ago(value)})"
            echo(f"{name:<{width}}  {text}")


def _text(value: Any, width: int) -> str:
    """Return a value as JSON; of a list of records each on a line of its own."""
    if isinstance(value, list) and isinstance(value[0], dict):
        return f"\n{' ' * width}  ".join(msgspec.json.encode(one).decode() for one in value)
    return msgspec.json.encode(value).decode()


def path_of(id_: str) -> str:
    """Return where the record of an id is; BadRequestError for ids that have none."""
    kind = KINDS.get(id_.partition("_")[0])
    if kind is None or "_" not in id_:
        raise BadRequestError(
            f"{id_!r} is no id of a node (n_...), job (job_...), task (t_...), actor (a_...) or "
            "placement group (pg_...)"
        )
    return f"/v1/{kind}/{id_}"
