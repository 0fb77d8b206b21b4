"""``stoker timeline`` and ``stoker summary``: what ran, as a trace and as counts, from the history."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.lists import TABLES, fetch_newest
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json, print_table
from stoker.cli.tables import Column, Row

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient

_job = click.option("--job", "job_id", metavar="ID", type=Id("job"), help="Only of this job.")
_limit = click.option(
    "--limit", type=click.IntRange(1), default=10_000, show_default=True,
    help="Attempts that are read at most, the newest.",
)  # fmt: skip
STATES = TABLES["tasks"].states


@click.command()
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False), default="timeline.json",
              show_default=True, help="File to write; - for stdout.")  # fmt: skip
@_job
@_limit
@cluster_options
def timeline(
    path: str,
    job_id: str | None,
    limit: int,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Write the task attempts that have ended as Chrome trace events.

    Open the file in Perfetto or in chrome://tracing: one row per worker. --json prints where it is.
    """
    import msgspec

    from stoker.api.trace import trace_events

    tasks = _tasks(http_client(address, token), job_id, limit)
    events = trace_events(tasks)
    content = msgspec.json.encode(events)
    if path == "-":
        echo(content.decode())
        return
    try:
        with click.open_file(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    if as_json:
        print_json({"file": path, "events": len(events)})
    else:
        echo(f"{len(events)} attempts in {path}; open it in Perfetto or chrome://tracing")


@click.command()
@_job
@_limit
@cluster_options
def summary(
    job_id: str | None, limit: int, address: str | None, token: str | None, as_json: bool
) -> None:
    """Count the attempts of tasks by name and state, of the newest ones."""
    tasks = _tasks(http_client(address, token), job_id, limit)
    rows = counted(tasks)
    if as_json:
        print_json(rows)
        return
    columns = [Column("name", "name", shrink=16)]
    shown = [name for name in STATES if any(row[name] for row in rows)]
    columns += [Column(name, name) for name in shown]
    print_table(rows, columns, empty="no tasks")
    if len(tasks) == limit:
        echo(f"the newest {limit} attempts; more: --limit N", err=True)


def counted(tasks: list[Row]) -> list[Row]:
    """Return a row per name with the number of attempts in each state, the most first."""
    counts = Counter((task["name"], task["state"]) for task in tasks)
    names = Counter(task["name"] for task in tasks)
    return [
        {"name": name, **{state: counts[name, state] for state in STATES}, "total": total}
        for name, total in names.most_common()
    ]


def _tasks(client: HttpClient, job_id: str | None, limit: int) -> list[Row]:
    query = {"job_id": resolve_id(client, job_id)} if job_id else {}
    return fetch_newest(client, "/v1/tasks", limit, query).items
