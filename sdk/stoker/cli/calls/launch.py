"""``stoker launch``: run a script written for torchrun on the nodes of a cluster, as many as there are.

A job whose driver is ``python -m stoker_train.launch.driver``, followed to its end, as ``stoker job submit``
does it. Without a cluster one is started on this machine for it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options import cluster_options, given_token, job_client, json_mapping, pairs
from stoker.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.jobs import JobSubmissionClient

    _NodesType = click.ParamType[tuple[int, int]]
else:
    _NodesType = click.ParamType  # generic only in newer versions of click

_MOST_NODES = 1000


class _Nodes(_NodesType):
    """``4`` or ``1:4``."""

    name = "N | MIN:MAX"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, sign, high = str(value).partition(":")
        try:
            least, most = int(low), int(high if sign else low)
        except ValueError:
            self.fail(f"{value!r} is no number of nodes; write it like 4, or 1:4", param, ctx)
        if not 1 <= least <= most <= _MOST_NODES:
            why = "exchange them" if least > most >= 1 else f"give from 1 to {_MOST_NODES}"
            self.fail(f"{value!r} is no number of nodes; {why}", param, ctx)
        return least, most


class _Launch(click.Command):
    """Takes all that stands behind the script as its arguments."""

    allow_interspersed_args = False


@click.command(
    cls=_Launch, short_help="Run a torchrun script on the cluster, with as many nodes as there are."
)
@click.option(
    "--nnodes",
    "nodes",
    type=_Nodes(),
    default="1",
    show_default=True,
    help="Nodes; of MIN:MAX the scheduler may change the number while it runs.",
)
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    "nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Workers on each node.",
)
@click.option(
    "--gpus-per-proc",
    "gpus",
    type=click.IntRange(0, 1),
    help="GPUs of each worker. [default: 1 if the cluster has any]",
)
@click.option(
    "--cpus-per-proc",
    "cpus",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="CPUs of each worker.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts of all workers after one failed; changes of nodes do not count.",
)
@click.option("-m", "--module", is_flag=True, help="The script is a module, as of python -m.")
@click.option(
    "--no-python", "--no_python", is_flag=True, help="The script is a program, not one of Python."
)
@click.option(
    "--log-dir",
    "--log_dir",
    metavar="DIR",
    help="Folder on the nodes that keeps each worker's output, as torchrun's.",
)
@click.option("--role", default="default", show_default=True, help="Name of the workers' role.")
@click.option(
    "--rdzv-timeout",
    "join_timeout_s",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds in which nodes that were started must meet.",
)
@click.option(
    "--monitor-interval",
    "--monitor_interval",
    "monitor_interval_s",
    type=click.FloatRange(0.01),
    default=0.1,
    show_default=True,
    help="Seconds between looks at the workers.",
)
@click.option(
    "--working-dir",
    metavar="DIR",
    help="Folder to send along; workers start in it. [default: this folder, which the nodes must have]",
)
@click.option(
    "--env", "env", multiple=True, metavar="K=V", help="Environment variable; repeatable."
)
@click.option(
    "--runtime-env-json", metavar="JSON", help="The whole runtime_env; options add to it."
)
@click.option("--name", default="", help="A name for people. [default: launch SCRIPT]")
@click.option("--queue", default="", help="The queue of the job. [default: default]")
@click.option("--node-filter", default="", metavar="CONDITION", help="A condition on each node.")
@click.option(
    "--local", is_flag=True, help="Start a cluster on this machine for it, even if there is one."
)
@cluster_options
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."
)
def launch(
    nodes: tuple[int, int],
    gpus: int | None,
    working_dir: str | None,
    env: tuple[str, ...],
    runtime_env_json: str | None,
    name: str,
    queue: str,
    local: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
    command: tuple[str, ...],
    **plain: Any,
) -> None:
    """Run a script written for torchrun on the cluster: stoker launch --nnodes 1:4 train.py --lr 0.1

    Workers have torchrun's environment. With MIN:MAX nodes the job is elastic: when nodes come or go, all
    workers are restarted, and should go on from their last checkpoint. Follows the output, and exits with
    the exit code of the worker that failed first.
    """
    _check(command, working_dir, plain["module"], plain["no_python"])
    if local and (address or token):
        raise click.UsageError("give --local or --address, not both")
    spec = {
        **plain,
        "command": command,
        "min_nodes": nodes[0],
        "max_nodes": nodes[1],
        "gpu": None if gpus is None else bool(gpus),
        "log_dir": os.path.abspath(plain["log_dir"]) if plain["log_dir"] else "",
        "cwd": "" if working_dir else os.getcwd(),
    }
    runtime_env = json_mapping(runtime_env_json, "--runtime-env-json") or {}
    if working_dir:
        runtime_env["working_dir"] = working_dir
    if env:
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **pairs(env, "--env")}
    with _cluster(address, token, local) as client:
        code = _run(client, spec, runtime_env, name or f"launch {command[0]}", queue, as_json)
    sys.exit(code)


def _check(command: tuple[str, ...], working_dir: str | None, module: bool, program: bool) -> None:
    """Refuse what no node could start."""
    if module and program:
        raise click.UsageError("give --module or --no-python, not both")
    if working_dir and not os.path.isdir(working_dir):
        raise click.BadParameter(f"{working_dir!r} is no folder", param_hint="--working-dir")
    if module or program:
        return
    path = os.path.join(working_dir or "", command[0])
    if not os.path.isfile(path):
        raise click.BadParameter(
            f"there is no file {path!r}; name the script by its path here, or below --working-dir",
            param_hint="SCRIPT",
        )


@contextlib.contextmanager
def _cluster(address: str | None, token: str | None, local: bool) -> Iterator[JobSubmissionClient]:
    """A client of the cluster that is meant, or of one that is started here for the time."""
    from stoker.exceptions import StartError
    from stoker.jobs import JobSubmissionClient
    from stoker.local.address import resolve
    from stoker.local.cluster import spawn_local

    if not local:
        try:
            resolve(address, given_token(token), embedded=False)
        except StartError:
            if address or os.environ.get("STOKER_ADDRESS"):
                raise
        else:
            yield job_client(address, token)
            return
    cluster = spawn_local()
    try:
        info = cluster.wait_ready()
        echo(f"started a cluster for it: {info.gcs_url}", err=True)
        yield JobSubmissionClient(info.gcs_url, info.token)
    finally:
        cluster.stop()


def _run(
    client: JobSubmissionClient,
    spec: dict[str, Any],
    runtime_env: dict[str, Any],
    name: str,
    queue: str,
    as_json: bool,
) -> int:
    """Submit the job, follow it, and return its exit code."""
    import msgspec

    from stoker.cli.job import exit_code, follow_job, tell_end

    words = ["python", "-m", "stoker_train.launch.driver", msgspec.json.encode(spec).decode()]
    job_id = client.submit_job(
        entrypoint=shlex.join(words), name=name, runtime_env=runtime_env, queue=queue
    )
    ended = follow_job(client, job_id, as_json)
    if exit_code(ended):
        tell_end(ended)
    return exit_code(ended)
