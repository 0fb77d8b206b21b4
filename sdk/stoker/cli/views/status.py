"""``stoker status``: the cluster on one screen: nodes, what is in use, jobs, what waits and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from stoker.cli.lists import fetch, fetch_newest, gpus_of, node_state
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import (
    ago,
    amount,
    duration,
    echo,
    heading,
    nbytes,
    plural,
    print_json,
    print_prose,
    print_table,
    resources,
)
from stoker.cli.scheduling.explain import print_groups
from stoker.cli.tables import Column, Row
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import ClusterResources, Demand
from stoker_wire.messages.control import (
    Explanation,
    Kept,
    Leader,
    RetentionStatus,
    WaitingGroup,
)

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient

_JOBS = 10
_EXPLAINED = 10
_SCHEDULER_S = 3.0
_ENDED = {"jobs": "ended", "actors": "dead", "placement_groups": "removed", "nodes": "dead"}


class Waiting(WaitingGroup, frozen=True, kw_only=True):
    """Requests of one job for the same, and how long the oldest of them waits."""

    job_id: str
    resources: dict[str, float]
    demand: Demand
    waited_s: float


class Status(msgspec.Struct):
    """The cluster as shown and as ``--json`` prints it: live nodes and jobs, counts of the others."""

    address: str
    scheduler: str
    nodes: list[Row]
    dead_nodes: int
    resources: ClusterResources | None
    jobs: list[Row]
    jobs_live: int
    jobs_ended: int
    pending: list[Row]
    waiting: list[Waiting]
    kept: RetentionStatus | None


NOT_ENFORCED = "are not enforced: a lease sets CUDA_VISIBLE_DEVICES, which its program can change"


@click.command()
@cluster_options
def status(address: str | None, token: str | None, as_json: bool) -> None:
    """Show nodes, resources in use, jobs, and what waits and why."""
    shown = _collect(http_client(address, token))
    if as_json:
        print_json(shown)
        return
    echo(f"cluster {heading(shown.address)}, scheduler {shown.scheduler}")
    _print_nodes(shown)
    _print_use(shown)
    _print_jobs(shown)
    _print_waiting(shown.waiting)
    _print_kept(shown.kept)


def _collect(client: HttpClient) -> Status:
    nodes = fetch_newest(client, "/v1/nodes", None, {"state": "ALIVE,SUSPECT"})
    dead = fetch_newest(client, "/v1/nodes", 1, {"state": "DEAD"})
    live = fetch_newest(client, "/v1/jobs", _JOBS, {"state": "PENDING,RUNNING"})
    ended = fetch_newest(client, "/v1/jobs", 1, {"state": "SUCCEEDED,FAILED,STOPPED"})
    total, pending, waiting, scheduler = None, [], [], "none leads"
    try:
        scheduler = client.call(
            "GET", "/v1/leaders/scheduler", reply=Leader, timeout_s=_SCHEDULER_S
        ).url
        total = client.call("GET", "/v1/cluster", reply=ClusterResources, timeout_s=_SCHEDULER_S)
        pending = fetch(client, "/v1/queue", 1000)
        waiting = grouped(pending)
        waiting[:_EXPLAINED] = [_why(client, group) for group in waiting[:_EXPLAINED]]
    except StokerError as error:
        scheduler += f" ({error})"
    return Status(
        client.base_url,
        scheduler,
        nodes.items,
        dead.total or 0,
        total,
        live.items,
        live.total or 0,
        ended.total or 0,
        pending,
        waiting,
        _kept(client),
    )


def _kept(client: HttpClient) -> RetentionStatus | None:
    try:
        return client.call("GET", "/v1/retention", reply=RetentionStatus)
    except NotFoundError:  # a gcs of an older version
        return None


def grouped(pending: list[Row]) -> list[Waiting]:
    """Group the requests of one job for the same, in the order of the queue."""
    groups: dict[object, tuple[Demand, list[Row]]] = {}
    for row in pending:
        demand = _demand_of(row)
        wants = msgspec.json.encode(demand, order="sorted")
        which = (wants, row["infeasible"], row.get("group_id"))
        groups.setdefault(which, (demand, []))[1].append(row)
    return [
        Waiting(
            kind="placement group" if rows[0].get("group_id") else "task",
            name=demand.name or rows[0].get("group_id") or "task",
            count=sum(row["count"] for row in rows),
            cause=f"{{{resources(demand.resources)}}}",
            example_id=rows[0].get("group_id", ""),
            infeasible=rows[0]["infeasible"],
            job_id=demand.job_id,
            resources=demand.resources,
            demand=demand,
            waited_s=max(row["waiting_s"] for row in rows),
        )
        for demand, rows in groups.values()
    ]


def _demand_of(row: Row) -> Demand:
    """Return what a request asks for, but for where its arguments lie, in which alike ones differ."""
    demand = row.get("demand") or {name: row[name] for name in ("job_id", "resources", "name")}
    return msgspec.structs.replace(msgspec.convert(demand, Demand), locality={})


def _why(client: HttpClient, group: Waiting) -> Waiting:
    if group.example_id:
        method, path, body = "GET", f"/v1/placement-groups/{group.example_id}/explain", None
    else:
        method, path, body = "POST", "/v1/explain", group.demand
    explanation = client.call(method, path, body, reply=Explanation, timeout_s=_SCHEDULER_S)
    return msgspec.structs.replace(
        group,
        cause=explanation.cause or explanation.summary,
        remedy=explanation.remedy,
        infeasible=explanation.state == "INFEASIBLE",
    )


def _print_nodes(shown: Status) -> None:
    alive = len(shown.nodes)
    see = "; see: stoker list nodes --all" if shown.dead_nodes else ""
    echo(f"\n{heading('Nodes')} ({alive} alive, {shown.dead_nodes} dead{see})")
    columns = (
        Column("node", "node_id"),
        Column("state", node_state),
        Column("host", "hostname", drop=1, shrink=10),
        Column("in use", lambda row: _in_use(shown.resources, row), shrink=16),
        Column("gpus", gpus_of, drop=2, shrink=12),
        Column("heartbeat", lambda row: ago(row.get("heartbeat_at_s")), drop=3),
    )
    print_table(shown.nodes, columns, empty="none", indent="  ")
    for why, names in _not_enforced(shown.nodes).items():
        of = f" of {', '.join(names)}" if len(names) < alive else ""
        print_prose(f"GPUs{of} {NOT_ENFORCED}" + (f" ({why})" if why else ""))


def _not_enforced(nodes: list[Row]) -> dict[str, list[str]]:
    """Return the nodes whose GPUs any worker can open, by the reason."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        is_real = any(not device.get("fake") for device in node.get("devices") or ())
        why = node.get("gpu_isolation_error") or ""
        if why or (is_real and not node.get("gpu_isolation")):
            found.setdefault(why, []).append(node["node_id"])
    return found


def _in_use(cluster: ClusterResources | None, row: Row) -> str:
    node_id = row["node_id"]
    if cluster is None or node_id not in cluster.nodes:
        return resources(row["resources"])
    free = cluster.nodes_available.get(node_id, {})
    return _used(cluster.nodes[node_id], free)


def _used(total: dict[str, float], free: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {amount(name, most - free.get(name, 0.0))}/{amount(name, most)}"
        for name, most in total.items()
    )


def _print_use(shown: Status) -> None:
    if shown.resources is not None and len(shown.nodes) > 1:
        echo(f"\n{heading('In use')}")
        print_prose(_used(shown.resources.total, shown.resources.available) or "nothing")


def _print_jobs(shown: Status) -> None:
    echo(f"\n{heading('Jobs')} ({shown.jobs_live} live, {shown.jobs_ended} ended)")
    columns = (
        Column("job", "job_id"),
        Column("state", "state"),
        Column("created", lambda row: ago(row["created_at_s"]), drop=1),
        Column("name", lambda row: row["name"] or row["entrypoint"], drop=2, shrink=16),
    )
    if shown.jobs:
        print_table(shown.jobs, columns, empty="", indent="  ")
    if shown.jobs_live > len(shown.jobs):
        more = shown.jobs_live - len(shown.jobs)
        echo(f"  and {more} more; see: stoker list jobs --filter state=PENDING,RUNNING")


def _print_waiting(waiting: list[Waiting]) -> None:
    if not waiting:
        echo(f"\n{heading('Waiting')}\n  nothing")
        return
    count = sum(group.count for group in waiting)
    echo(f"\n{heading('Waiting')} ({count} for resources)")
    for job_id in dict.fromkeys(group.job_id for group in waiting):
        of_job = [group for group in waiting if group.job_id == job_id]
        longest = duration(max(group.waited_s for group in of_job))
        print_prose(f"of {job_id}, for up to {longest}; more: stoker explain {job_id}")
        print_groups(of_job[:_JOBS])
        if len(of_job) > _JOBS:
            echo(f"  and {plural(len(of_job) - _JOBS, 'more cause')}")


def _print_kept(kept: RetentionStatus | None) -> None:
    """Show what is kept of what has ended, and since when, on one or two lines."""
    if kept is None:
        return
    texts = [_kept_text(one) for one in kept.kinds if one.count]
    texts.append(f"{plural(kept.log_files, 'log file')} of {nbytes(kept.log_bytes)}")
    if kept.environments:
        count = plural(kept.environments, "environment")
        texts.append(f"{count} on disk of {nbytes(kept.environment_bytes)}")
    echo(f"\n{heading('Kept')} (limits: stoker config | grep -E 'keep|log_')")
    print_prose(", ".join(texts))


def _kept_text(one: Kept) -> str:
    name = f"{_ENDED.get(one.kind, '')} {one.kind.replace('_', ' ')}".strip()
    since = f" (the oldest {ago(one.oldest_at_s)})" if one.oldest_at_s else ""
    return f"{one.count} {name[:-1] if one.count == 1 else name}{since}"
