"""``stoker status``: the cluster on one screen: nodes, what is in use, jobs, what waits and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import (
    Row,
    ago,
    amount,
    duration,
    heading,
    print_json,
    print_table,
    resources,
    state,
)
from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import ClusterResources, Demand
from stoker_wire.messages.control import Explanation, Leader

if TYPE_CHECKING:
    from stoker._http import HttpClient

_JOBS = 10
_EXPLAINED = 5
_DEAD_SHOWN = 3
_SCHEDULER_S = 3.0


class _Status(msgspec.Struct):
    """What is shown, and what ``--json`` prints."""

    address: str
    nodes: list[Row]
    resources: ClusterResources | None
    jobs: list[Row]
    pending: list[Row]
    scheduler: str


@click.command()
@cluster_options
def status(address: str | None, token: str | None, as_json: bool) -> None:
    """Show nodes, resources in use, jobs, and what waits and why."""
    found = _collect(http_client(address, token))
    if as_json:
        print_json(found)
        return
    click.echo(f"cluster {heading(found.address)}, scheduler {found.scheduler}")
    _print_nodes(found)
    _print_use(found)
    _print_jobs(found.jobs)
    _print_pending(found.pending)


def _collect(client: HttpClient) -> _Status:
    from stoker.cli.lists import fetch

    nodes = fetch(client, "/v1/nodes", 1000)
    jobs = fetch(client, "/v1/jobs", 1000)
    total, pending, scheduler = None, [], "none leads"
    try:
        scheduler = client.call(
            "GET", "/v1/leaders/scheduler", reply=Leader, timeout_s=_SCHEDULER_S
        ).url
        total = client.call("GET", "/v1/cluster", reply=ClusterResources, timeout_s=_SCHEDULER_S)
        pending = fetch(client, "/v1/queue", 1000)
        for entry in pending[:_EXPLAINED]:
            entry["reason"], entry["remedy"] = _why(client, entry)
    except StokerError as error:
        scheduler += f" ({error})"
    return _Status(client.base_url, nodes, total, jobs, pending, scheduler)


def _why(client: HttpClient, entry: Row) -> tuple[str, str]:
    demand = Demand(job_id=entry["job_id"], resources=entry["resources"], name=entry["name"])
    told = client.call("POST", "/v1/explain", demand, reply=Explanation, timeout_s=_SCHEDULER_S)
    return told.summary, told.remedy


def _print_nodes(found: _Status) -> None:
    dead = [row for row in found.nodes if row["state"] == "DEAD"]
    alive = [row for row in found.nodes if row["state"] != "DEAD"]
    click.echo(f"\n{heading('Nodes')} ({len(alive)} alive, {len(dead)} dead)")
    columns: dict[str, Any] = {
        "node": "node_id",
        "state": "state",
        "host": "hostname",
        "in use": lambda row: _in_use(found.resources, row),
        "gpus": _gpus,
        "heartbeat": lambda row: ago(row.get("heartbeat_at_s")),
    }
    dead.sort(key=lambda row: row.get("heartbeat_at_s", 0.0), reverse=True)
    print_table(alive + dead[:_DEAD_SHOWN], columns, empty="none")


def _gpus(row: Row) -> str:
    names = [device["name"] for device in row.get("devices") or ()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "-"


def _in_use(found: ClusterResources | None, row: Row) -> str:
    node_id = row["node_id"]
    if found is None or node_id not in found.nodes:
        return resources(row["resources"])
    free = found.nodes_available.get(node_id, {})
    return _used(found.nodes[node_id], free)


def _used(total: dict[str, float], free: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {amount(name, most - free.get(name, 0.0))}/{amount(name, most)}"
        for name, most in total.items()
    )


def _print_use(found: _Status) -> None:
    if found.resources is not None:
        click.echo(f"\n{heading('In use')}")
        click.echo(f"  {_used(found.resources.total, found.resources.available) or 'nothing'}")


def _print_jobs(jobs: list[Row]) -> None:
    live = [row for row in jobs if row["state"] in ("PENDING", "RUNNING")]
    ended = len(jobs) - len(live)
    click.echo(f"\n{heading('Jobs')} ({len(live)} live, {ended} ended)")
    for row in live[-_JOBS:]:
        name = row["name"] or row["entrypoint"]
        click.echo(f"  {row['job_id']}  {state(row['state'])}  {ago(row['created_at_s'])}  {name}")


def _print_pending(pending: list[Row]) -> None:
    if not pending:
        click.echo(f"\n{heading('Waiting')}\n  nothing")
        return
    count = sum(row["count"] for row in pending)
    click.echo(f"\n{heading('Waiting')} ({count} in {len(pending)} requests)")
    for row in pending[:_JOBS]:
        what = f"{row['count']} x {row['name'] or 'task'} {{{resources(row['resources'])}}}"
        waits = f"for {duration(row['waiting_s'])}"
        never = click.style(" can never run", fg="red") if row["infeasible"] else ""
        click.echo(f"  {what} of {row['job_id']} {waits}{never}")
        if row.get("reason"):
            click.echo(f"      {row['reason']}")
        if row.get("remedy"):
            click.echo(f"      to change that: {row['remedy']}")
