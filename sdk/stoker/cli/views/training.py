"""``stoker train``: how the training of jobs goes, by what it reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import duration, echo, print_json, print_table
from stoker.cli.tables import Column, Row
from stoker_wire.http.training import TrainingRun
from stoker_wire.messages.control import Page

if TYPE_CHECKING:
    from stoker_wire.http.training import Number

_NONE = "-"
COLUMNS = (
    Column("job", "job_id"),
    Column("run", "run"),
    Column("step", "step"),
    Column("steps/s", "speed"),
    Column("last report", "ago", drop=1),
    Column("newest values", "newest", shrink=20),
)


@click.group()
def train() -> None:
    """Show how training goes: what `stoker.train.report` has reported."""


@train.command()
@click.argument("job_id", metavar="[JOB]", required=False, type=Id("job"))
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Runs at most."
)
@cluster_options
def runs(
    job_id: str | None, limit: int, address: str | None, token: str | None, as_json: bool
) -> None:
    """List runs with their newest values, those that began last first."""
    client = http_client(address, token)
    query = {"job_id": resolve_id(client, job_id)} if job_id else {}
    page = client.call(
        "GET", "/v1/training-runs", reply=Page[TrainingRun], query={**query, "limit": limit}
    )
    if as_json:
        print_json(page)
        return
    print_table(
        [_row_of(one) for one in page.items],
        COLUMNS,
        empty="no runs: a program reports with stoker.train.report(step, loss=loss)",
    )
    for one in page.items:
        if one.note:
            echo(f"{one.job_id} {one.run}: {one.note}", err=True)
    if page.next_cursor:
        echo("there are more: --limit N", err=True)


def _row_of(run: TrainingRun) -> Row:
    return {
        "job_id": run.job_id,
        "run": run.run,
        "step": str(run.newest_step),
        "speed": _NONE if run.steps_per_s is None else f"{run.steps_per_s:.3g}",
        "ago": f"{duration(max(0.0, time.time() - run.newest_at_s))} ago",
        "newest": ", ".join(f"{name} {_text(value)}" for name, value in run.newest.items()),
    }


def _text(value: Number) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
