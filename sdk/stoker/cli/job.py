"""``stoker job``: run programs on the cluster as drivers, follow them, stop them."""

from __future__ import annotations

import shlex
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import Bytes, cluster_options, job_client, json_mapping, pairs
from stoker.cli.output import (
    ago,
    duration,
    echo,
    in_,
    nbytes,
    print_json,
    print_line,
    print_output,
    state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker.jobs import JobSubmissionClient
    from stoker_wire.messages.control import LogLine
    from stoker_wire.messages.work import Job

_EXIT = {"SUCCEEDED": 0, "STOPPED": 143}
_ARRAY_LOOK_S = 2.0


@click.group()
def job() -> None:
    """Submit, list, follow and stop jobs."""


def submission_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a job that is submitted, now or at the times of a schedule."""
    for option in reversed(
        [
            click.option(
                "--working-dir", metavar="DIR", help="Folder to send along; the job starts in it."
            ),
            click.option(
                "--env",
                "env",
                multiple=True,
                metavar="K=V",
                help="Environment variable; repeatable.",
            ),
            click.option(
                "--py-module",
                "modules",
                multiple=True,
                metavar="PATH",
                help="Folder, .py file or wheel to make importable; repeatable.",
            ),
            click.option(
                "--pip", "pip", multiple=True, metavar="REQ", help="Requirement; repeatable."
            ),
            click.option(
                "--runtime-env-json",
                metavar="JSON",
                help="The whole runtime_env; options add to it.",
            ),
            click.option("--name", default="", help="A name for people."),
            click.option(
                "--metadata", multiple=True, metavar="K=V", help="Kept with the job; repeatable."
            ),
            click.option(
                "--num-cpus",
                type=click.FloatRange(0),
                default=0.0,
                show_default=True,
                help="CPUs of the driver itself.",
            ),
            click.option(
                "--num-gpus",
                type=click.FloatRange(0),
                default=0.0,
                show_default=True,
                help="GPUs of the driver itself.",
            ),
            click.option(
                "--memory",
                type=Bytes(),
                default=0,
                show_default=True,
                help="Memory of the driver itself, as 8GiB.",
            ),
            click.option(
                "--node-filter",
                default="",
                metavar="CONDITION",
                help="A condition on the driver's node: \"labels.rack != 'r7' and free.gpu >= 2\".",
            ),
            click.option(
                "--toleration",
                "tolerations",
                multiple=True,
                metavar="KEY[=VALUE][:EFFECT]",
                help="A taint that does not keep the driver from a node; repeatable.",
            ),
            click.option(
                "--queue",
                default="",
                help="The queue of the job and all that it starts. [default: default]",
            ),
            click.option(
                "--priority",
                type=int,
                default=0,
                show_default=True,
                help="Its priority in the queue, added to that of each task.",
            ),
            click.option(
                "--start-deadline",
                "start_deadline_s",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="Fail the job unless it has started by then.",
            ),
            click.option(
                "--timeout",
                "timeout_s",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="Fail the job when it runs for longer.",
            ),
            click.option(
                "--array",
                "array_text",
                metavar="INDICES[%N]",
                help="Run it once for each index, N at a time: 0-99%8, 0-20:5, 1,4,9. "
                "$STOKER_ARRAY_INDEX has it.",
            ),
            click.option(
                "--one-per-node",
                "one_per_node",
                is_flag=True,
                help="Run it once on each node that lives and can run it; $STOKER_ARRAY_INDEX counts them.",
            ),
            click.option(
                "--retries",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="Run it again when it fails, so many times; $STOKER_JOB_ATTEMPT counts from 1.",
            ),
            click.option(
                "--preemptible",
                is_flag=True,
                help="Work with a better claim may end it; it is run again when there is room.",
            ),
            click.option(
                "--preemption-grace",
                "preemption_grace_s",
                type=click.FloatRange(0),
                metavar="SECONDS",
                help="From the notice to that end. [default: the setting preemption_grace_s]",
            ),
            click.option(
                "--retry-delay",
                "retry_delay_s",
                type=click.FloatRange(0),
                metavar="SECONDS",
                default=10.0,
                show_default=True,
                help="Wait so long before the first retry, and twice as long before each further one.",
            ),
        ]
    ):
        command = option(command)
    return click.argument("entrypoint", nargs=-1, required=True, type=click.UNPROCESSED)(command)


def submission_of(
    *,
    working_dir: str | None,
    env: tuple[str, ...],
    modules: tuple[str, ...],
    pip: tuple[str, ...],
    runtime_env_json: str | None,
    metadata: tuple[str, ...],
    num_cpus: float,
    num_gpus: float,
    memory: int,
    array_text: str | None,
    entrypoint: tuple[str, ...],
    **plain: Any,
) -> dict[str, Any]:
    """Return what ``submit_job`` takes for these options."""
    return {
        "entrypoint": entrypoint[0] if len(entrypoint) == 1 else shlex.join(entrypoint),
        "runtime_env": _runtime_env(working_dir, env, modules, pip, runtime_env_json),
        "metadata": pairs(metadata, "--metadata"),
        "entrypoint_num_cpus": num_cpus,
        "entrypoint_num_gpus": num_gpus,
        "entrypoint_memory": memory,
        **_array(array_text),
        **plain,
    }


@job.command(short_help="Run a command on the cluster, and follow it.")
@click.option("--job-id", help="An id of your own; submitting it twice is an error.")
@click.option(
    "--after",
    multiple=True,
    metavar="JOB[:ok|failed|any]",
    help="Start when this job has ended (so), fail if it ended otherwise; repeatable.",
)
@click.option(
    "--output",
    "output_dir",
    metavar="DIR",
    help="At the end, copy what it wrote into $STOKER_JOB_OUTPUT_DIR to DIR.",
)
@click.option("--no-wait", is_flag=True, help="Print the job's id and leave.")
@cluster_options
@submission_options
def submit(
    job_id: str | None,
    after: tuple[str, ...],
    output_dir: str | None,
    no_wait: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
    **options: Any,
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
        job_id=job_id, after=_after(client, after), **submission_of(**options)
    )
    if no_wait:
        _print_job(client.get_job(submitted), as_json)
        return
    echo(f"submitted {submitted}", err=True)
    if options["array_text"] is None and not options["one_per_node"]:
        ended = follow_job(client, submitted, attempt=1)
    else:
        ended = follow_array(client, submitted)
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
        print_written(client.download_job_output(job_id, target), target)
    except (StokerError, OSError) as error:
        echo(f"{click.style('error:', fg='red', bold=True)} no output: {error}", err=True)
        return False
    return True


def print_written(written: list[str], target: str) -> None:
    files = f"{len(written)} {'file' if len(written) == 1 else 'files'}"
    what = f"{files} in {target}" if written else "it wrote nothing into $STOKER_JOB_OUTPUT_DIR"
    echo(f"output: {what}", err=True)


def _array(text: str | None) -> dict[str, Any]:
    """Return the indices of ``0-99:2%8`` or ``1,4,9``; a usage error shows how to write them."""
    if text is None:
        return {}
    from stoker_wire.messages.work import MAX_ARRAY

    written, sign, most = text.partition("%")
    indices: list[int] = []
    try:
        parallelism = int(most) if sign else 0
        for part in written.split(","):
            span, _, step = part.partition(":")
            first, dash, last = span.partition("-")
            more = range(int(first), int(last if dash else first) + 1, int(step or 1))
            if len(indices) + len(more) > MAX_ARRAY:
                raise click.BadParameter(
                    f"{text!r} has more than {MAX_ARRAY} indices: submit several arrays",
                    param_hint="--array",
                )
            indices += more
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: write it like 0-99, 0-99%8, 0-20:5 or 1,4,9", param_hint="--array"
        ) from None
    return {"array": indices, "array_parallelism": parallelism}


def _after(client: JobSubmissionClient, given: tuple[str, ...]) -> dict[str, str]:
    """Return dependencies as ids and conditions; beginnings of ids will do."""
    read = {}
    for text in given:
        job_id, sign, condition = text.partition(":")
        if sign and condition not in ("any", "ok", "failed"):
            raise click.BadParameter(
                f"{text!r}: write JOB, JOB:ok, JOB:failed or JOB:any", param_hint="--after"
            )
        read[resolve_id(client.http, job_id)] = condition or "any"
    return read


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
    """Print log lines, those of no process on stderr: their text, or with ``--json`` one object each."""
    for line in lines:
        if as_json:
            print_line(line)
        else:
            print_output(line)


def follow_job(
    client: JobSubmissionClient, job_id: str, as_json: bool = False, attempt: int = 0
) -> Job:
    """Print the driver's lines until the job ends, and return it; Ctrl-C says how to go on.

    Begins with this attempt of the job; 0 is the present one.
    """
    from stoker.cli.views.builds import follow_builds
    from stoker_wire.settings import Settings

    after_s = Settings.from_env().wait_notice_s
    notice = threading.Timer(after_s, _tell_why_it_waits, (client, job_id, after_s))
    notice.daemon = True
    if after_s:
        notice.start()
    if client.get_job(job_id).runtime_env.installs:
        follow_builds(client.http, job_id)
    try:
        print_lines(client.tail_job_logs(job_id, attempt=attempt), as_json)
        return client.wait(job_id)
    except KeyboardInterrupt:
        echo(
            f"\nno longer following; {job_id} goes on\n"
            f"  follow it again:  stoker job logs -f {job_id}\n"
            f"  stop it:          stoker job stop {job_id}",
            err=True,
        )
        sys.exit(130)
    finally:
        notice.cancel()


def follow_array(client: JobSubmissionClient, array_id: str) -> Job:
    """Tell how far an array is until it ends, and return it; its members have the output."""
    from stoker.exceptions import DeadlineExceededError

    told = ""
    while True:
        try:
            return client.wait(array_id, timeout_s=_ARRAY_LOOK_S)
        except DeadlineExceededError:
            message = client.get_job(array_id).message
        if message and message != told:
            echo(message, err=True)
            told = message


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
    echo(
        f"stoker: {job_id} has waited {waited_s:g} s for its driver to start: {why.summary}{remedy}. "
        f"More: stoker explain {job_id}",
        err=True,
    )


def tell_end(ended: Job) -> None:
    took_s = (ended.ended_at_s or 0.0) - (ended.started_at_s or ended.ended_at_s or 0.0)
    # The last lines of output, which follow in the message, were shown live.
    cause = ended.message.partition("\n")[0]
    message = f": {cause}" if cause and ended.state != "SUCCEEDED" else ""
    echo(f"{ended.job_id} {state(ended.state)} after {duration(took_s)}{message}", err=True)


def exit_code(ended: Job) -> int:
    """Return the driver's exit code; 128 + signal, as shells have it, for one that was killed."""
    if ended.exit_code is not None:
        return 128 - ended.exit_code if ended.exit_code < 0 else ended.exit_code
    return _EXIT.get(ended.state, 1)


def _print_job(record: Job, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        echo(record.job_id)


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
    from stoker.runtime.process.terminal import printable

    client = job_client(address, token)
    record = client.get_job(resolve_id(client.http, job_id))
    if as_json:
        print_json(record)
        return
    echo(f"{record.job_id}  {state(record.state)}  {printable(record.name or record.entrypoint)}")
    for label, text in (
        ("entrypoint", printable(record.entrypoint)),
        ("submitted", ago(record.created_at_s)),
        ("started", ago(record.started_at_s)),
        ("ended", ago(record.ended_at_s)),
        ("exit code", "" if record.exit_code is None else str(record.exit_code)),
        ("node", record.node_id),
        ("schedule", record.schedule),
        ("attempt", f"{record.attempt} of {most}" if (most := record.max_attempts) > 1 else ""),
        ("next try", in_(record.retry_at_s) if record.state == "PENDING" else ""),
        ("message", record.message),
    ):
        if text:
            echo(f"  {label:<11}{text}")
    for one in record.attempts:
        took = duration(one.ended_at_s - one.started_at_s)
        where = f" on {one.node_id}" if one.node_id else ""
        echo(f"  attempt {one.attempt}  failed after {took}{where}: {one.cause}")


@job.command()
@cluster_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit with its code.")
@click.option(
    "--attempt",
    type=click.IntRange(1),
    metavar="N",
    help="That of a job which was retried. [default: the last]",
)
@click.argument("job_id", metavar="ID", type=Id("job"))
def logs(
    job_id: str,
    follow: bool,
    attempt: int | None,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Show what the driver of a job has printed; with --json one object per line.

    `stoker logs` shows workers, tasks and actors as well.
    """
    from stoker_wire.messages.control import LogLine

    client = job_client(address, token)
    job_id = resolve_id(client.http, job_id)
    if not follow:
        query = {"attempt": attempt}
        path = f"/v1/jobs/{job_id}/logs"
        print_lines(client.http.lines(path, item=LogLine, query=query), as_json)
        return
    ended = follow_job(client, job_id, as_json, attempt or 0)
    tell_end(ended)
    sys.exit(exit_code(ended))


@job.command()
@cluster_options
@click.argument("job_id", metavar="ID", type=Id("job"))
def delete(job_id: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Remove a job that has ended from all lists, with the history of its tasks."""
    client = job_client(address, token)
    record = client.delete_job(resolve_id(client.http, job_id))
    if as_json:
        print_json(record)
    else:
        echo(f"{record.job_id} is deleted")


@job.command()
@cluster_options
@click.option("--to", "target", metavar="DIR", help="Copy the files of all nodes into this folder.")
@click.argument("job_id", metavar="ID", type=Id("job"))
def output(
    job_id: str, target: str | None, address: str | None, token: str | None, as_json: bool
) -> None:
    """Copy what a job wrote into $STOKER_JOB_OUTPUT_DIR, or show where it is."""
    client = job_client(address, token)
    job_id = resolve_id(client.http, job_id)
    if target is not None:
        written = client.download_job_output(job_id, target)
        if as_json:
            print_json(written)
        else:
            print_written(written, target)
        return
    record = client.get_job_output(job_id)
    if as_json:
        print_json(record)
        return
    for node in record.nodes:
        echo(f"{node.node_id}  {node.files} files, {nbytes(node.nbytes)}  {node.path}")
    if record.lost or not record.nodes:
        echo(record.lost or f"{job_id} wrote nothing into $STOKER_JOB_OUTPUT_DIR", err=True)


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
        print_json(record)
    else:
        echo(f"{job_id} {record.state}")
