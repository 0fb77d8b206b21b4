"""``stoker schedule``: submit jobs at the times of a cron line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stoker.cli.job import submission_of, submission_options
from stoker.cli.options import cluster_options, job_client
from stoker.cli.output import ago, clock, echo, in_, print_json, print_table

if TYPE_CHECKING:
    from stoker_wire.messages.schedules import Schedule


@click.group("schedule")
def schedule() -> None:
    """Submit jobs at the times of a cron line."""


@schedule.command("create")
@click.option(
    "--cron",
    required=True,
    metavar="LINE",
    help="Its times: minute hour day month weekday, as '30 3 * * 1-5'.",
)
@click.option("--time-zone", metavar="ZONE", default="UTC", show_default=True, help="Of its times.")
@click.option(
    "--concurrency",
    type=click.Choice(["Allow", "Forbid", "Replace"]),
    default="Allow",
    show_default=True,
    help="While the job of an earlier time goes on: run too, skip the run, or stop that one.",
)
@click.option(
    "--missed-runs",
    type=click.Choice(["skip", "run-once"]),
    default="skip",
    show_default=True,
    help="Of times at which no gcs ran: none, or one job for all of them.",
)
@click.option(
    "--starting-deadline",
    "starting_deadline_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Skip a run that is later. [default: 60, with run-once none]",
)
@click.option(
    "--history-limit",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Jobs to keep that have ended; older ones are deleted.",
)
@click.option("--paused", is_flag=True, help="Submit nothing until it is resumed.")
@cluster_options
@click.argument("schedule_name", metavar="NAME")
@submission_options
def create(
    schedule_name: str,
    cron: str,
    time_zone: str,
    concurrency: str,
    missed_runs: str,
    starting_deadline_s: float | None,
    history_limit: int,
    paused: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
    **submission: Any,
) -> None:
    """Submit a job at the times of a cron line; its options are those of `stoker job submit`.

    stoker schedule create nightly --cron '0 3 * * *' --time-zone Europe/Zurich -- python report.py
    """
    made = job_client(address, token).create_schedule(
        schedule_name,
        cron=cron,
        time_zone=time_zone,
        concurrency=concurrency,
        missed_runs=missed_runs,
        starting_deadline_s=starting_deadline_s,
        history_limit=history_limit,
        paused=paused,
        **submission_of(**submission),
    )
    _print(made, as_json)


@schedule.command("list")
@cluster_options
def list_(address: str | None, token: str | None, as_json: bool) -> None:
    """List schedules: their times, and how their runs went."""
    import msgspec

    from stoker.cli.tables import Column

    found = job_client(address, token).list_schedules()
    if as_json:
        print_json(found)
        return
    columns = (
        Column("schedule", "name"),
        Column("cron", "cron"),
        Column("time zone", "time_zone", drop=5),
        Column("next", lambda row: "paused" if row["paused"] else in_(row["next_at_s"])),
        Column("last", lambda row: ago(row["last_at_s"]), drop=3),
        Column("runs", "runs", drop=6),
        Column("skipped", "skipped", drop=4),
        Column("entrypoint", lambda row: row["job"]["entrypoint"], drop=2, shrink=20),
        Column("message", "message", drop=1, shrink=20),
    )
    print_table(msgspec.to_builtins(found), columns, empty="no schedules")


@schedule.command("get")
@cluster_options
@click.argument("name")
def get(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Show a schedule: when it runs next, and why its latest run was skipped."""
    found = job_client(address, token).get_schedule(name)
    if as_json:
        print_json(found)
        return
    when = f"{in_(found.next_at_s)}, at {clock(found.next_at_s)} here"
    echo(f"{found.name}  {'paused' if found.paused else when}")
    for label, text in (
        ("entrypoint", found.job.entrypoint),
        ("cron", f"{found.cron} ({found.time_zone})"),
        ("overlaps", found.concurrency.value),
        ("missed runs", found.missed_runs.value),
        ("last run", f"{found.last_job_id}, {ago(found.last_at_s)}" if found.last_job_id else ""),
        ("runs", f"{found.runs}, {found.skipped} skipped"),
        ("message", found.message),
    ):
        if text:
            echo(f"  {label:<13}{text}")


@schedule.command("pause")
@cluster_options
@click.argument("name")
def pause(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Submit nothing more until it is resumed; jobs that run go on."""
    _print(job_client(address, token).pause_schedule(name), as_json)


@schedule.command("resume")
@cluster_options
@click.argument("name")
def resume(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Go on at the next time; times that have passed meanwhile are not made up for."""
    _print(job_client(address, token).resume_schedule(name), as_json)


@schedule.command("delete")
@cluster_options
@click.argument("name")
def delete(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Remove a schedule; jobs that it has submitted stay."""
    removed = job_client(address, token).delete_schedule(name)
    if as_json:
        _print(removed, as_json)
    else:
        echo(f"schedule {removed.name} is deleted")


def _print(made: Schedule, as_json: bool) -> None:
    if as_json:
        print_json(made)
    elif made.paused:
        echo(f"schedule {made.name} is paused")
    else:
        echo(f"schedule {made.name} runs {in_(made.next_at_s)}, at {clock(made.next_at_s)}")
