"""``stoker logs``: what a job's driver, a task's worker, an actor or a worker has printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client, job_client
from stoker.cli.output import print_line, print_output
from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from stoker.jobs import JobSubmissionClient
    from stoker.runtime.net.http import HttpClient


class _Source(msgspec.Struct):
    """A stream of log lines, by its path and query."""

    path: str
    query: dict[str, object] = {}


@click.command()
@cluster_options
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until it ends.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@click.option("--workers", is_flag=True, help="With a job: the output of its workers as well.")
@click.argument("id_", metavar="ID", type=Id("job", "task", "actor", "worker"))
def logs(
    id_: str,
    follow: bool,
    tail: int | None,
    workers: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Show the output of a job (job_), task (t_), actor (a_) or worker (w_).

    A task's output is that of the worker that ran it, other tasks of that worker included. The
    beginning of an id will do if no other begins so. With --json one object per line. Following a
    job ends with the exit code of the job.
    """
    client = http_client(address, token)
    id_ = resolve_id(client, id_)
    if follow and id_.startswith("job_"):
        _follow_job(job_client(address, token), id_, tail, workers, as_json)
    try:
        _print(client, _source(client, id_, workers), follow, tail, as_json, workers)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _follow_job(
    client: JobSubmissionClient, job_id: str, tail: int | None, workers: bool, as_json: bool
) -> NoReturn:
    """Follow a job as `stoker job logs -f` does, and leave with its exit code."""
    from stoker.cli.job import exit_code, follow_job, tell_end

    if tail is None and not workers:
        ended = follow_job(client, job_id, as_json)
    else:
        source = _source(client.http, job_id, workers)
        try:
            _print(client.http, source, True, tail, as_json, workers)
            ended = client.wait(job_id)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    tell_end(ended)
    sys.exit(exit_code(ended))


def _print(
    client: HttpClient, source: _Source, follow: bool, tail: int | None, as_json: bool, named: bool
) -> None:
    from stoker_wire.messages.control import LogLine

    query = {**source.query, "follow": follow, "tail": tail}
    for line in client.lines(source.path, item=LogLine, query=query):
        if as_json:
            print_line(line)
        else:
            print_output(line, named=named)


def _source(client: HttpClient, id_: str, workers: bool) -> _Source:
    prefix = id_.partition("_")[0]
    if prefix == "job":
        return _Source(f"/v1/jobs/{id_}/{'worker-logs' if workers else 'logs'}")
    if prefix == "t":
        return _Source(f"/v1/tasks/{id_}/logs")
    if prefix == "a":
        actor = client.call("GET", f"/v1/actors/{id_}", reply=dict[str, Any])
        if not actor["worker_id"]:
            raise NotFoundError(
                f"{id_} is {actor['state']} and has no worker yet\nsee: stoker explain {id_}"
            )
        return _of_worker(actor["job_id"], actor["worker_id"])
    if prefix == "w":
        return _of_worker(_job_of_worker(client, id_), id_)
    raise BadRequestError(f"{id_!r} has no output\ngive the id of a job, task, actor or worker")


def _of_worker(job_id: str, worker_id: str) -> _Source:
    return _Source(f"/v1/jobs/{job_id}/worker-logs", {"worker_id": worker_id})


def _job_of_worker(client: HttpClient, worker_id: str) -> str:
    from stoker.cli.lists import fetch

    for worker in fetch(client, "/v1/workers", 10_000):
        if worker["worker_id"] == worker_id and worker["job_id"]:
            return str(worker["job_id"])
    query = {"kind": EventKind.WORKER_EXITED.value, "subject": worker_id}
    for event in fetch(client, "/v1/events", 1, query):
        if event["payload"].get("job_id"):
            return str(event["payload"]["job_id"])
    raise NotFoundError(f"no worker {worker_id} has run anything for a job")
