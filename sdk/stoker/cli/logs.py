"""``stoker logs``: what a job's driver, a task's worker, an actor or a worker has printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from stoker.cli.options import cluster_options, http_client
from stoker_wire.errors import BadRequestError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from stoker._http import HttpClient


class _Source(msgspec.Struct):
    """Which stream of log lines: of the gcs, or of a worker at its node."""

    client: Any
    path: str
    query: dict[str, object]


@click.command()
@cluster_options
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until it ends.")
@click.option("--workers", is_flag=True, help="With a job: the output of its workers as well.")
@click.argument("id_", metavar="ID")
def logs(
    id_: str,
    follow: bool,
    workers: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Show the output of a job (job_), task (t_), actor (a_) or worker (w_).

    A task's output is that of the worker that ran it, other tasks of that worker included.
    """
    from stoker.cli.output import print_line
    from stoker_wire.messages.control import LogLine

    client = http_client(address, token)
    try:
        for source in _sources(client, id_, workers):
            query = {**source.query, "follow": follow}
            for line in source.client.lines(source.path, item=LogLine, query=query):
                if as_json:
                    print_line(line)
                elif line.worker_id and workers:
                    name = f"({line.name} pid={line.pid})"
                    click.echo(f"{click.style(name, fg='cyan')} {line.text}")
                else:
                    click.echo(line.text)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _sources(client: HttpClient, id_: str, workers: bool) -> list[_Source]:
    prefix = id_.partition("_")[0]
    if prefix == "job":
        of_workers = _Source(client, f"/v1/jobs/{id_}/worker-logs", {})
        return [of_workers] if workers else [_Source(client, f"/v1/jobs/{id_}/logs", {})]
    if prefix == "w":
        return [_Source(_node_of_worker(client, id_), "/v1/logs", {"worker_id": id_})]
    if prefix not in ("t", "a"):
        raise BadRequestError(f"{id_!r} has no output; give the id of a job, task, actor or worker")
    kind = "tasks" if prefix == "t" else "actors"
    record = client.call("GET", f"/v1/{kind}/{id_}", reply=dict[str, Any])
    worker_id, node_id = record.get("worker_id", ""), record.get("node_id", "")
    if not worker_id:
        raise NotFoundError(
            f"{id_} is {record.get('state')} and has not been on a worker; see: stoker explain {id_}"
        )
    node = client.call("GET", f"/v1/nodes/{node_id}", reply=dict[str, Any])
    return [_Source(client.to(node["url"]), "/v1/logs", {"worker_id": worker_id})]


def _node_of_worker(client: HttpClient, worker_id: str) -> HttpClient:
    from stoker.cli.lists import fetch

    for node in fetch(client, "/v1/nodes", 1000):
        if node["state"] == "DEAD":
            continue
        nodelet = client.to(node["url"])
        try:
            first = nodelet.lines("/v1/logs", item=dict, query={"worker_id": worker_id})
            if next(iter(first), None) is not None:
                return nodelet
        except (NotFoundError, UnavailableError):
            continue
    raise NotFoundError(f"no living node has output of {worker_id}")
