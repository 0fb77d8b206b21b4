"""``stoker job``: run programs on the cluster as drivers, follow them, stop them."""

from __future__ import annotations

import shlex
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import Bytes, cluster_options, job_client, json_mapping, pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.jobs import JobSubmissionClient
    from stoker_wire.messages.control import LogLine
    from stoker_wire.messages.work import Job

_EXIT = {"SUCCEEDED": 0, "STOPPED": 143}


@click.group()
def job() -> None:
    """Submit, list, follow and stop jobs."""


@job.command(short_help="Run a command on the cluster, and follow it.")
@click.option("--working-dir", metavar="DIR", help="Folder to send along; the job starts in it.")
@click.option(
    "--env", "env", multiple=True, metavar="K=V", help="Environment variable; repeatable."
)
@click.option("--py-module", "modules", multiple=True, metavar="PATH",
              help="Folder, .py file or wheel to make importable; repeatable.")  # fmt: skip
@click.option("--pip", "pip", multiple=True, metavar="REQ", help="Requirement; repeatable.")
@click.option(
    "--runtime-env-json", metavar="JSON", help="The whole runtime_env; options add to it."
)
@click.option("--name", default="", help="A name for people.")
@click.option("--job-id", help="An id of your own; submitting it twice is an error.")
@click.option("--metadata", multiple=True, metavar="K=V", help="Kept with the job; repeatable.")
@click.option(
    "--num-cpus",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="CPUs of the driver itself.",
)
@click.option(
    "--num-gpus",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="GPUs of the driver itself.",
)
@click.option(
    "--memory",
    type=Bytes(),
    default=0,
    show_default=True,
    help="Memory of the driver itself, as 8GiB.",
)
@click.option("--output", "output_dir", metavar="DIR",
              help="At the end, copy what it wrote into $STOKER_JOB_OUTPUT_DIR to DIR.")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Print the job's id and leave.")
@cluster_options
@click.argument("entrypoint", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    working_dir: str | None,
    env: tuple[str, ...],
    modules: tuple[str, ...],
    pip: tuple[str, ...],
    runtime_env_json: str | None,
    name: str,
    job_id: str | None,
    metadata: tuple[str, ...],
    num_cpus: float,
    num_gpus: float,
    memory: int,
    output_dir: str | None,
    no_wait: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
    entrypoint: tuple[str, ...],
) -> None:
    """Run a command on the cluster: stoker job submit --working-dir . -- python train.py --lr 0.1

    Follows the output and exits with the job's exit code. Ctrl-C only stops following.
    """
    if no_wait and output_dir is not None:
        raise click.UsageError(
            "--output waits for the job's end, and --no-wait does not; "
            "fetch it later with: stoker job output JOB --to DIR",
            ctx=click.get_current_context(),
        )
    client = job_client(address, token)
    submitted = client.submit_job(
        entrypoint=entrypoint[0] if len(entrypoint) == 1 else shlex.join(entrypoint),
        job_id=job_id,
        name=name,
        runtime_env=_runtime_env(working_dir, env, modules, pip, runtime_env_json),
        metadata=pairs(metadata, "--metadata"),
        entrypoint_num_cpus=num_cpus,
        entrypoint_num_gpus=num_gpus,
        entrypoint_memory=memory,
    )
    if no_wait:
        _print_job(client.get_job(submitted), as_json)
        return
    click.echo(f"submitted {submitted}", err=True)
    ended = follow_job(client, submitted)
    if as_json:
        _print_job(ended, as_json)
    else:
        tell_end(ended)
    fetched = output_dir is None or _fetch(client, submitted, output_dir)
    sys.exit(exit_code(ended) or int(not fetched))


def _fetch(client: JobSubmissionClient, job_id: str, target: str) -> bool:
    """Copy a job's output; a failure is printed, and must not hide how the job ended."""
    from stoker.exceptions import StokerError

    try:
        print_output(client.download_job_output(job_id, target), target)
    except (StokerError, OSError) as error:
        click.echo(f"{click.style('error:', fg='red', bold=True)} no output: {error}", err=True)
        return False
    return True


def print_output(written: list[str], target: str) -> None:
    files = f"{len(written)} {'file' if len(written) == 1 else 'files'}"
    what = f"{files} in {target}" if written else "it wrote nothing into $STOKER_JOB_OUTPUT_DIR"
    click.echo(f"output: {what}", err=True)


def _runtime_env(
    working_dir: str | None,
    env: tuple[str, ...],
    modules: tuple[str, ...],
    pip: tuple[str, ...],
    text: str | None,
) -> dict[str, Any]:
    environment = json_mapping(text, "--runtime-env-json") or {}
    if working_dir is not None:
        environment["working_dir"] = working_dir
    if env:
        environment["env_vars"] = {**environment.get("env_vars", {}), **pairs(env, "--env")}
    if modules:
        environment["py_modules"] = [*environment.get("py_modules", ()), *modules]
    if pip:
        environment["pip"] = [*environment.get("pip", ()), *pip]
    return environment


def print_lines(lines: Iterable[LogLine], as_json: bool) -> None:
    """Print log lines: their text, or with ``--json`` one object each."""
    from stoker.cli.output import print_line

    for line in lines:
        if as_json:
            print_line(line)
        else:
            click.echo(line.text)


def follow_job(client: JobSubmissionClient, job_id: str, as_json: bool = False) -> Job:
    """Print the driver's lines until the job ends, and return it; Ctrl-C says how to go on."""
    from stoker_wire.settings import Settings

    after_s = Settings.from_env().wait_notice_s
    notice = threading.Timer(after_s, _tell_why_it_waits, (client, job_id, after_s))
    notice.daemon = True
    if after_s:
        notice.start()
    try:
        print_lines(client.tail_job_logs(job_id), as_json)
        return client.wait(job_id)
    except KeyboardInterrupt:
        click.echo(
            f"\nno longer following; {job_id} goes on\n"
            f"  follow it again:  stoker job logs -f {job_id}\n"
            f"  stop it:          stoker job stop {job_id}",
            err=True,
        )
        sys.exit(130)
    finally:
        notice.cancel()


def _tell_why_it_waits(client: JobSubmissionClient, job_id: str, waited_s: float) -> None:
    from stoker_wire.errors import StokerError
    from stoker_wire.messages.work import JobState

    try:
        if client.get_job_status(job_id) is not JobState.PENDING:
            return
        why = client.explain_job(job_id)
    except StokerError:
        return  # whoever follows the job hears of it
    remedy = f"; {why.remedy}" if why.remedy else ""
    click.echo(
        f"stoker: {job_id} has waited {waited_s:g} s for its driver to start: {why.summary}{remedy}. "
        f"More: stoker explain {job_id}",
        err=True,
    )


def tell_end(ended: Job) -> None:
    from stoker.cli.output import duration, state

    took_s = (ended.ended_at_s or 0.0) - (ended.started_at_s or ended.ended_at_s or 0.0)
    # The last lines of output, which follow in the message, were shown live.
    cause = ended.message.partition("\n")[0]
    message = f": {cause}" if cause and ended.state != "SUCCEEDED" else ""
    click.echo(f"{ended.job_id} {state(ended.state)} after {duration(took_s)}{message}", err=True)


def exit_code(ended: Job) -> int:
    """Return the driver's exit code; 128 + signal, as shells have it, for one that was killed."""
    if ended.exit_code is not None:
        return 128 - ended.exit_code if ended.exit_code < 0 else ended.exit_code
    return _EXIT.get(ended.state, 1)


def _print_job(record: Job, as_json: bool) -> None:
    if as_json:
        from stoker.cli.output import print_json

        print_json(record)
    else:
        click.echo(record.job_id)


@job.command("list")
@cluster_options
@click.pass_context
def list_jobs(ctx: click.Context, /, **options: Any) -> None:
    """List jobs, the newest first; see `stoker list jobs` for filters."""
    from stoker.cli.lists import list_group

    usual = {"limit": 100, "everything": False, "wide": False, "filters": ()}
    ctx.invoke(list_group.commands["jobs"], **usual, **options)


@job.command()
@cluster_options
@click.argument("job_id", metavar="ID", type=Id("job"))
def status(job_id: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Show the state of a job; exit code 0 whatever it is. Unique beginnings of an ID will do."""
    from stoker.cli.output import ago, print_json, state

    client = job_client(address, token)
    record = client.get_job(resolve_id(client.http, job_id))
    if as_json:
        print_json(record)
        return
    click.echo(f"{record.job_id}  {state(record.state)}  {record.name or record.entrypoint}")
    for label, text in (
        ("entrypoint", record.entrypoint),
        ("submitted", ago(record.created_at_s)),
        ("started", ago(record.started_at_s)),
        ("ended", ago(record.ended_at_s)),
        ("exit code", "" if record.exit_code is None else str(record.exit_code)),
        ("node", record.node_id),
        ("message", record.message),
    ):
        if text:
            click.echo(f"  {label:<11}{text}")


@job.command()
@cluster_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit with its code.")
@click.argument("job_id", metavar="ID", type=Id("job"))
def logs(job_id: str, follow: bool, address: str | None, token: str | None, as_json: bool) -> None:
    """Show what the driver of a job has printed; with --json one object per line.

    `stoker logs` shows workers, tasks and actors as well.
    """
    from stoker_wire.messages.control import LogLine

    client = job_client(address, token)
    job_id = resolve_id(client.http, job_id)
    if not follow:
        print_lines(client.http.lines(f"/v1/jobs/{job_id}/logs", item=LogLine), as_json)
        return
    ended = follow_job(client, job_id, as_json)
    tell_end(ended)
    sys.exit(exit_code(ended))


@job.command()
@cluster_options
@click.option("--to", "target", metavar="DIR", help="Copy the files of all nodes into this folder.")
@click.argument("job_id", metavar="ID", type=Id("job"))
def output(
    job_id: str, target: str | None, address: str | None, token: str | None, as_json: bool
) -> None:
    """Copy what a job wrote into $STOKER_JOB_OUTPUT_DIR, or show where it is."""
    from stoker.cli.output import nbytes, print_json

    client = job_client(address, token)
    job_id = resolve_id(client.http, job_id)
    if target is not None:
        written = client.download_job_output(job_id, target)
        if as_json:
            print_json(written)
        else:
            print_output(written, target)
        return
    record = client.get_job_output(job_id)
    if as_json:
        print_json(record)
        return
    for node in record.nodes:
        click.echo(f"{node.node_id}  {node.files} files, {nbytes(node.nbytes)}  {node.path}")
    if record.lost or not record.nodes:
        click.echo(record.lost or f"{job_id} wrote nothing into $STOKER_JOB_OUTPUT_DIR", err=True)


@job.command()
@cluster_options
@click.option("--no-wait", is_flag=True, help="Do not wait until it has ended.")
@click.argument("job_id", metavar="ID", type=Id("job"))
def stop(job_id: str, no_wait: bool, address: str | None, token: str | None, as_json: bool) -> None:
    """End a job: SIGTERM to its driver, SIGKILL 3 seconds later."""
    client = job_client(address, token)
    job_id = resolve_id(client.http, job_id)
    record = client.stop_job(job_id)
    if not no_wait:
        record = client.wait(job_id, timeout_s=30.0)
    if as_json:
        from stoker.cli.output import print_json

        print_json(record)
    else:
        click.echo(f"{job_id} {record.state}")
