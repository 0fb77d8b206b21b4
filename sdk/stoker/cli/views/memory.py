"""``stoker memory``: how full the nodes' shared memory is, and who holds what there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.lists import fetch, fetch_newest
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import ago, echo, heading, nbytes, print_json, print_table
from stoker.cli.tables import Column, Row
from stoker.cli.views.frame import bar
from stoker.cli.views.summary import MOST, OBJECT_COLUMNS, objects_by_place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.runtime.net.http import HttpClient

NODES = (
    Column("node", "node_id"),
    Column("host", "hostname", drop=3, shrink=10),
    Column("arena", lambda row: _arena(row)),
    Column("objects", lambda row: str(row["objects"]), drop=2),
    Column("in objects", lambda row: nbytes(row["object_bytes"]), drop=1),
    Column("on disk", lambda row: nbytes(row["spilled_bytes"]), drop=1),
)
OBJECTS = (
    Column("object", "object_id"),
    Column("size", lambda row: nbytes(row["nbytes"])),
    Column("where", "where", drop=3),
    Column("held by", "holder", drop=1),
    Column("created", lambda row: ago(row.get("created_at_s")), drop=4),
    Column("job", "job_id", drop=2),
    Column("node", "node_id", drop=5),
)


@click.command()
@click.option("--job", "job_id", metavar="ID", type=Id("job"), help="Only objects of this job.")
@click.option("--node", "node_id", metavar="ID", type=Id("node"), help="Only of this node.")
@click.option(
    "--limit", type=click.IntRange(1, MOST), default=20, show_default=True,
    help="Objects shown at most, the largest.",
)  # fmt: skip
@cluster_options
def memory(
    job_id: str | None,
    node_id: str | None,
    limit: int,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Show how full each node's shared memory is, and which process holds which objects there.

    Objects of a driver are held by its refs, those of a worker by the actor or the task that runs there,
    detached ones by nobody: they stay until stoker.free(). Small values are in no shared memory.
    """
    client = http_client(address, token)
    asked = {"job_id": job_id, "node_id": node_id}
    query = {name: resolve_id(client, given) for name, given in asked.items() if given}
    nodes = [
        _node(row)
        for row in fetch_newest(client, "/v1/nodes", None, {"state": "ALIVE,SUSPECT"}).items
    ]
    if "node_id" in query:
        nodes = [row for row in nodes if row["node_id"] == query["node_id"]]
    page = fetch_newest(client, "/v1/objects", MOST, query)
    places = objects_by_place(page.items)
    largest = sorted(page.items, key=lambda row: -row["nbytes"])[:limit]
    _name_holders(client, largest)
    if as_json:
        print_json({"nodes": nodes, "holders": places, "objects": largest})
        return
    echo(heading("Shared memory"))
    print_table(nodes, NODES, empty="no nodes", indent="  ")
    echo(f"\n{heading('By node and job')}")
    print_table(places, OBJECT_COLUMNS, empty="nothing", indent="  ")
    more = "+" if page.next_cursor else ""
    echo(f"\n{heading('Largest objects')} ({len(largest)} of {len(page.items)}{more})")
    print_table(largest, OBJECTS, empty="none", indent="  ")


def _node(row: Row) -> Row:
    usage = row.get("usage") or {}
    names = ("objects", "object_bytes", "arena_bytes", "arena_limit_bytes", "spilled_bytes")
    measured = {name: int(usage.get(name, 0)) for name in names}
    return {"node_id": row["node_id"], "hostname": row.get("hostname", ""), **measured}


def _arena(row: Row) -> str:
    most = row["arena_limit_bytes"]
    if not most:  # a nodelet of an older version, or one that has told nothing yet
        return nbytes(row["arena_bytes"] or row["object_bytes"])
    part = row["arena_bytes"] / most
    return (
        f"{click.unstyle(bar(part, 10))} {part:.0%}, {nbytes(row['arena_bytes'])} of {nbytes(most)}"
    )


def _name_holders(client: HttpClient, objects: Iterable[Row]) -> None:
    """Add to each object where it is, and what holds it."""
    objects = list(objects)
    workers: dict[str, Row] = {}
    detached: dict[str, Row] = {}
    if objects:
        workers = {row["worker_id"]: row for row in fetch(client, "/v1/workers", MOST)}
        detached = {row["object_id"]: row for row in fetch(client, "/v1/detached-objects", MOST)}
    for one in objects:
        one["where"] = "disk" if one.get("spilled") else "memory"
        one["holder"] = _holder(one, workers, detached)


def _holder(one: Row, workers: dict[str, Row], detached: dict[str, Row]) -> str:
    owner_id: str = one.get("owner_id", "")
    if one["object_id"] in detached:
        name = detached[one["object_id"]].get("name", "")
        return f"detached {name}".rstrip()
    if one.get("copy_of"):
        return f"copy of that on {one['copy_of']}"
    worker = workers.get(owner_id)
    if worker is not None:
        what = f"actor {worker['actor_id']}" if worker.get("actor_id") else f"worker {owner_id}"
        return f"{what}, pid {worker.get('pid', 0)}"
    return f"driver {owner_id}" if owner_id.startswith("p_") else owner_id
