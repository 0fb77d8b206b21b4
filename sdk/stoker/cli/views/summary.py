"""``stoker summary``: tasks by function, actors by class, objects by node and job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.lists import TABLES, fetch_newest
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import duration, echo, hours, nbytes, plural, print_json, print_table
from stoker.cli.tables import Column, Row
from stoker_wire.http.dashboard.figures import Durations, FunctionSummary, TaskSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker.runtime.net.http import HttpClient

TASKS, ACTORS, OBJECTS = "tasks", "actors", "objects"
MOST = 10_000
"""Actors and objects that are counted at most, the newest."""
_FUNCTIONS = 1000
OBJECT_COLUMNS = (
    Column("node", "node_id"),
    Column("job", "job_id"),
    Column("objects", "objects"),
    Column("size", lambda row: nbytes(row["nbytes"])),
    Column("copies", lambda row: str(row["copies"] or ""), drop=2),
    Column("on disk", lambda row: _nbytes(row["spilled_nbytes"]), drop=1),
    Column("largest", lambda row: nbytes(row["largest_nbytes"]), drop=3),
)


@click.command()
@click.argument("what", type=click.Choice((TASKS, ACTORS, OBJECTS)), default=TASKS)
@click.option("--job", "job_id", metavar="ID", type=Id("job"), help="Only of this job.")
@click.option(
    "--limit", type=click.IntRange(1, _FUNCTIONS), default=100, show_default=True,
    help="Rows at most: those with the most attempts, actors or bytes.",
)  # fmt: skip
@cluster_options
def summary(
    what: str, job_id: str | None, limit: int, address: str | None, token: str | None, as_json: bool
) -> None:
    """Add up tasks by function (the default), actors by class, or objects by node and job.

    Of tasks: attempts by state, also of those that retention has removed, half, nine tenths and 99 of 100
    of them ran and waited no longer than p50, p90 and p99, the CPUs and GPUs that they held times the hours,
    and their failures by error.
    """
    client = http_client(address, token)
    query = {"job_id": resolve_id(client, job_id)} if job_id else {}
    if what == TASKS:
        _tasks(client, query, limit, as_json)
    elif what == ACTORS:
        _actors(client, query, limit, as_json)
    else:
        _objects(client, query, limit, as_json)


def _tasks(client: HttpClient, query: dict[str, str], limit: int, as_json: bool) -> None:
    found = client.call(
        "GET", "/v1/tasks/summary", reply=TaskSummary, query={**query, "limit": limit}
    )
    if as_json:
        print_json(found)
        return
    print_functions(found.items)
    if found.total > len(found.items):
        echo(f"{len(found.items)} of {plural(found.total, 'function')}; more: --limit N", err=True)


def print_functions(items: Iterable[FunctionSummary]) -> None:
    """Print one line per function: how many, how long, and how they failed."""
    items = list(items)
    columns = [Column("function", "name", shrink=12)]
    columns += [
        Column(name, _state_of(name), drop=0 if name in ("RUNNING", "FAILED") else 4)
        for name in TABLES[TASKS].states
        if any(one.states.get(name) for one in items)
    ]
    columns += [
        Column("run p50", "run_p50", drop=2),
        Column("p90", "run_p90", drop=3),
        Column("p99", "run_p99", drop=3),
        Column("wait p50", "wait_p50", drop=5),
        Column("p90", "wait_p90", drop=6),
        Column("p99", "wait_p99", drop=6),
    ]
    if any(one.gpu_s for one in items):
        columns.append(Column("GPU-hours", "gpu_hours", drop=2))
    if any(one.cpu_s for one in items):
        columns.append(Column("CPU-hours", "cpu_hours", drop=4))
    columns.append(Column("failures", "failures", drop=1, shrink=14))
    print_table([_row_of(one) for one in items], columns, empty="no tasks")


def _state_of(name: str) -> Callable[[Row], str]:
    return lambda row: str(row["states"].get(name, 0))


def _row_of(one: FunctionSummary) -> Row:
    return {
        "name": one.key,
        "states": one.states,
        **_times("run", one.run_s),
        **_times("wait", one.wait_s),
        "gpu_hours": hours(one.gpu_s),
        "cpu_hours": hours(one.cpu_s),
        "failures": failures(one.failures),
    }


def _times(what: str, measured: Durations) -> dict[str, str]:
    if not measured.count:
        return {}
    return {f"{what}_{name}": duration(getattr(measured, name)) for name in ("p50", "p90", "p99")}


def failures(counts: dict[str, int]) -> str:
    """Return failures by error as ``3 value_error, 1 worker_died``, the most first."""
    return ", ".join(f"{count} {code}" for code, count in Counter(counts).most_common())


def _actors(client: HttpClient, query: dict[str, str], limit: int, as_json: bool) -> None:
    page = fetch_newest(client, "/v1/actors", MOST, query)
    rows = actors_by_class(page.items)[:limit]
    if as_json:
        print_json(rows)
        return
    states = [
        name for name in TABLES[ACTORS].states if any(row["states"].get(name) for row in rows)
    ]
    columns = [
        Column("class", "class_name", shrink=12),
        *(Column(name, _state_of(name)) for name in states),
        Column("restarts", lambda row: str(row["restarts"] or ""), drop=2),
        Column("deaths", lambda row: failures(row["deaths"]), drop=1, shrink=14),
    ]
    print_table(rows, columns, empty="no actors")
    _tell_more(page.next_cursor, ACTORS)


def actors_by_class(actors: Iterable[Row]) -> list[Row]:
    """Return a row per class: its actors by state, their restarts, and what they died of."""
    found: dict[str, Row] = {}
    for actor in actors:
        name = actor["class_name"]
        row = found.setdefault(
            name,
            {
                "class_name": name,
                "count": 0,
                "states": Counter(),
                "restarts": 0,
                "deaths": Counter(),
            },
        )
        row["count"] += 1
        row["states"][actor["state"]] += 1
        row["restarts"] += actor.get("restarts", 0)
        cause = actor.get("death_cause") if actor["state"] == "DEAD" else None
        if cause:
            row["deaths"][cause["code"]] += 1
    return sorted(found.values(), key=lambda row: (-row["count"], row["class_name"]))


def _objects(client: HttpClient, query: dict[str, str], limit: int, as_json: bool) -> None:
    page = fetch_newest(client, "/v1/objects", MOST, query)
    rows = objects_by_place(page.items)[:limit]
    if as_json:
        print_json(rows)
        return
    print_table(rows, OBJECT_COLUMNS, empty=TABLES[OBJECTS].empty)
    _tell_more(page.next_cursor, OBJECTS)


def objects_by_place(objects: Iterable[Row]) -> list[Row]:
    """Return a row per node and job of whose process the objects are, the most bytes first."""
    found: dict[tuple[str, str], Row] = {}
    for one in objects:
        node_id, job_id = one.get("node_id", ""), one.get("job_id", "")
        row = found.setdefault(
            (node_id, job_id),
            {"node_id": node_id, "job_id": job_id, "objects": 0, "nbytes": 0,
             "spilled_nbytes": 0, "copies": 0, "largest_nbytes": 0},
        )  # fmt: skip
        row["objects"] += 1
        row["nbytes"] += one["nbytes"]
        row["spilled_nbytes"] += one["nbytes"] if one.get("spilled") else 0
        row["copies"] += bool(one.get("copy_of"))
        row["largest_nbytes"] = max(row["largest_nbytes"], one["nbytes"])
    return sorted(found.values(), key=lambda row: (-row["nbytes"], row["node_id"], row["job_id"]))


def _tell_more(cursor: str, what: str) -> None:
    if cursor:
        echo(f"of the newest {MOST} {what}; more: --job ID", err=True)


def _nbytes(value: float) -> str:
    return nbytes(value) if value else ""
