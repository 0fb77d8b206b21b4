"""``stoker stack`` and ``stoker profile``: what a running process does now, and where its time goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, heading, nbytes, plural, print_json
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.node_api import (
    MAX_PROFILE_S,
    PROFILE_FORMATS,
    ProfileFormat,
    ProfileKind,
    Stacks,
    StackWay,
    TakeProfile,
)

if TYPE_CHECKING:
    from stoker_wire.messages.node_api import ProcessStacks, ThreadStack

KINDS = ("task", "actor", "worker", "job", "node")
_WAYS = {
    StackWay.PY_SPY: "by py-spy",
    StackWay.WORKER: "as the worker itself says",
    StackWay.SIGNAL: "by faulthandler",
}
_SUFFIXES = (
    (".speedscope.json", ProfileKind.CPU, ProfileFormat.SPEEDSCOPE),
    (".svg", ProfileKind.CPU, ProfileFormat.SVG),
    (".raw", ProfileKind.CPU, ProfileFormat.RAW),
    (".txt", ProfileKind.CPU, ProfileFormat.RAW),
    (".json", ProfileKind.CPU, ProfileFormat.TRACE),
    (".html", ProfileKind.MEMORY, ProfileFormat.HTML),
    (".json", ProfileKind.TORCH, ProfileFormat.TRACE),
)
_DEFAULT_NAMES = {
    ProfileFormat.SVG: "flame.svg",
    ProfileFormat.SPEEDSCOPE: "profile.speedscope.json",
    ProfileFormat.RAW: "profile.raw",
    ProfileFormat.TRACE: "trace.json",
    ProfileFormat.HTML: "memory.html",
}
_SLACK_S = 120.0


@click.command()
@cluster_options
@click.argument("targets", metavar="ID...", nargs=-1, required=True, type=Id(*KINDS))
def stack(targets: tuple[str, ...], address: str | None, token: str | None, as_json: bool) -> None:
    """Show where a task (t_), actor (a_), worker (w_), job (job_) or node (n_) is in its code, now.

    All threads of its processes, the innermost function first. The beginning of an id will do if no other
    begins so. Exits with 1 if there are no stacks at all.
    """
    client = http_client(address, token)
    answers = [
        client.call("GET", "/v1/stacks", reply=Stacks, query={"target": one}) for one in targets
    ]
    if as_json:
        print_json(answers[0] if len(answers) == 1 else answers)
    else:
        for answer in answers:
            print_stacks(answer)
    if not any(one.threads for answer in answers for one in answer.processes):
        sys.exit(1)


def print_stacks(stacks: Stacks) -> None:
    """Print the threads of each process."""
    for one in stacks.processes:
        _print_process(one)
    if stacks.note:
        echo(stacks.note)
    if stacks.left_out:
        echo(f"{plural(stacks.left_out, 'process').replace('processs', 'processes')} left out")


def _print_process(one: ProcessStacks) -> None:
    how = f", {_WAYS[one.way]}" if one.way is not None else ""
    echo(f"{heading(f'worker {one.worker_id}')} pid {one.pid} on node {one.node_id}{how}")
    if one.error:
        echo(f"  no stacks: {one.error.replace(chr(10), '; ')}")
    elif one.why_not_better:
        echo(f"  not by py-spy: {one.why_not_better.replace(chr(10), '; ')}")
    if one.task_ids:
        echo(f"  runs {', '.join(one.task_ids)}")
    for thread in one.threads:
        _print_thread(thread, "thread")
    for coroutine in one.coroutines:
        _print_thread(coroutine, "coroutine")


def _print_thread(thread: ThreadStack, what: str) -> None:
    facts = [
        name
        for name, holds in (("active", thread.active), ("holds the interpreter", thread.holds_gil))
        if holds
    ]
    echo(f"  {what} {thread.name}" + (f" ({', '.join(facts)})" if facts else ""))
    for frame in thread.frames:
        echo(f"    {frame.function} ({frame.file}:{frame.line})")


@click.command()
@cluster_options
@click.option(
    "-s", "--seconds", type=click.FloatRange(0.1, MAX_PROFILE_S), default=10.0, show_default=True,
    help="How long to record.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Where to write it; the suffix says the format. [default: by format]")  # fmt: skip
@click.option("--format", "format_", type=click.Choice([one.value for one in ProfileFormat]),
              help="Its format, if the suffix does not say it.")  # fmt: skip
@click.option("--memory", is_flag=True, help="What is allocated, by memray.")
@click.option("--torch", is_flag=True, help="Operators and kernels, by torch.profiler.")
@click.option("--rate", type=click.IntRange(1, 1000), default=100, show_default=True,
              help="Samples per second.")  # fmt: skip
@click.option("--native", is_flag=True, help="Functions of C and C++ as well.")
@click.option("--gil", is_flag=True, help="Only the thread that holds the interpreter.")
@click.argument("target", metavar="ID", type=Id(*KINDS[:-1]))
def profile(
    target: str,
    seconds: float,
    output: Path | None,
    format_: str | None,
    memory: bool,
    torch: bool,
    rate: int,
    native: bool,
    gil: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Record what a task (t_), actor (a_), worker (w_) or the driver of a job (job_) does, into a file.

    A flame graph (.svg), a profile for speedscope.app (.speedscope.json), folded stacks (.raw) or a trace
    (.json); with --memory a page (.html), with --torch a trace for Perfetto (.json). The process goes on
    meanwhile, a little slower.
    """
    from stoker.runtime.net.http import Content

    if memory and torch:
        raise click.UsageError("--memory and --torch are two profiles: take one after the other")
    kind = ProfileKind.MEMORY if memory else ProfileKind.TORCH if torch else ProfileKind.CPU
    order = TakeProfile(
        target=target,
        kind=kind,
        seconds=seconds,
        format=format_of(kind, output, format_),
        rate=rate,
        native=native,
        gil=gil,
    )
    assert order.format is not None
    path = output or Path(_DEFAULT_NAMES[order.format])
    client = http_client(address, token)
    try:
        content = client.call(
            "POST", "/v1/profiles", order, reply=Content, timeout_s=seconds + _SLACK_S
        )
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    path.write_bytes(content.data)
    if as_json:
        print_json({"path": str(path), "nbytes": len(content.data), "format": order.format})
    else:
        echo(f"wrote {path} ({nbytes(len(content.data))})")


def format_of(kind: ProfileKind, output: Path | None, given: str | None) -> ProfileFormat:
    """Return the format of a file, by what was given, its suffix, or the kind of profile."""
    if given:
        return ProfileFormat(given)
    if output is None:
        return PROFILE_FORMATS[kind][0]
    for suffix, of_kind, format_ in _SUFFIXES:
        if of_kind is kind and output.name.endswith(suffix):
            return format_
    known = ", ".join(suffix for suffix, of_kind, _ in _SUFFIXES if of_kind is kind)
    raise BadRequestError(
        f"{output.name!r} has no suffix of a {kind} profile\nuse one of {known}, or --format"
    )
