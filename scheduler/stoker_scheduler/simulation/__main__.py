"""``python -m stoker_scheduler.simulation``, or ``stoker simulate``: what would happen to this trace?

Runs the real scheduler core in virtual time on a cluster and a trace from files, and prints utilisation,
waiting, completion, fairness and preemptions. The same inputs and seed give the same output.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.resources import to_amounts
from stoker_scheduler.core.queueing.policies import POLICIES
from stoker_scheduler.core.state import SchedulingPolicy
from stoker_scheduler.policy_loading import load_policies
from stoker_scheduler.simulation.figures import Figures, figures, usage_over_time
from stoker_scheduler.simulation.inputs import (
    Cluster,
    InputError,
    TraceJob,
    read_cluster,
    read_trace,
)
from stoker_scheduler.simulation.run import Allocation, Simulation
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator

PLOTTED = ("GPU", "CPU")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cluster",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML: [[nodes]] with count, resources, labels; [queues.NAME] as for `stoker queue apply`.",
)
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV: job_id, submit_s, duration_s, and tasks, gang, cpus, gpus, memory, queue, user, priority.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("priority",),
    show_default=True,
    metavar="NAME",
    help="The policy of queues that name none; several are compared.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is random.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Tasks take up to this fraction more or less than the trace says.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the allocation log, the figures as JSON, and plots.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def main(
    cluster: Path,
    trace: Path,
    policies: tuple[str, ...],
    seed: int,
    jitter: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run a trace of jobs on a cluster of your choice, with the real scheduler in virtual time."""
    if any(name not in POLICIES for name in policies):
        load_policies()
    for name in policies:
        if name not in POLICIES:
            raise click.BadParameter(
                f"{name!r} is none; {suggestion(name, POLICIES)}", param_hint="--policy"
            )
    try:
        place, jobs = read_cluster(cluster), read_trace(trace)
        _check_queues(trace, place, jobs)
    except InputError as error:
        raise click.ClickException(str(error)) from None
    results: dict[str, Figures] = {}
    for name in policies:
        with _progress(name, len(jobs), quiet=as_json) as advance:
            log, capacity = simulate(place, jobs, name, seed=seed, jitter=jitter, progress=advance)
        results[name] = figures(log, capacity)
        if out is not None:
            _write(out, name, log, results[name], capacity)
    if as_json:
        click.echo(json.dumps({name: asdict(one) for name, one in results.items()}, indent=2))
    else:
        _print(results)
        if out is not None:
            click.echo(f"\nallocation logs and figures are in {out}")


def simulate(
    cluster: Cluster,
    jobs: Sequence[TraceJob],
    policy: str,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[list[Allocation], dict[str, float]]:
    """Run one simulation; return its log, and what the cluster has in all."""
    queues = [replace(queue, policy=queue.policy or policy) for queue in cluster.queues]
    named = {queue.name for queue in queues}
    unnamed = (name for name in dict.fromkeys(job.queue for job in jobs) if name not in named)
    queues += [QueueSpec(name=name, policy=policy) for name in unnamed]
    simulation = Simulation(
        replace(cluster, queues=tuple(queues)), jobs, SchedulingPolicy(), seed=seed, jitter=jitter
    )
    simulation.run(progress)
    return simulation.log, to_amounts(simulation.state.capacity)


def _check_queues(trace: Path, cluster: Cluster, jobs: Sequence[TraceJob]) -> None:
    """Refuse a job of a queue that the cluster does not have, if it has any."""
    names = [queue.name for queue in cluster.queues]
    for job in jobs:
        if names and job.queue not in (*names, "default"):
            raise InputError(
                f"{trace}: job {job.job_id!r} is in queue {job.queue!r}, which the cluster does not have\n"
                f"{suggestion(job.queue, names)}"
            )


@contextmanager
def _progress(name: str, jobs: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"policy {name}", total=jobs)
        yield lambda over: bar.update(task, completed=over)


def _print(results: Mapping[str, Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Jobs")
    table.add_column("policy")
    for name in results:
        table.add_column(name, justify="right")
    columns = [_rows(one) for one in results.values()]
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(text for _, text in row))
    console.print(table)
    if any(len(one.queues) > 1 for one in results.values()):
        queues = Table(title="Queues")
        for heading in (
            "policy",
            "queue",
            "jobs",
            "share",
            "waiting mean",
            "p95",
            "completion mean",
        ):
            queues.add_column(
                heading, justify="left" if heading in ("policy", "queue") else "right"
            )
        for name, one in results.items():
            for queue in one.queues:
                queues.add_row(
                    name,
                    queue.name,
                    str(queue.jobs),
                    f"{queue.share:.1%}",
                    _time(queue.waiting_s.mean),
                    _time(queue.waiting_s.p95),
                    _time(queue.completion_s.mean),
                )
        console.print(queues)


def _rows(one: Figures) -> list[tuple[str, str]]:
    """Return the names of figures, and the figures."""
    waiting, completion = one.waiting_s, one.completion_s
    return [
        ("jobs", str(one.jobs)),
        ("rejected", str(one.rejected)),
        ("asked to give way", str(one.preemptions)),
        ("makespan", _time(one.makespan_s)),
        *((f"{name} in use", f"{part:.1%}") for name, part in one.utilisation.items()),
        ("waiting, mean", _time(waiting.mean)),
        (
            "waiting, p50 / p95 / p99",
            " / ".join(map(_time, (waiting.p50, waiting.p95, waiting.p99))),
        ),
        ("completion, mean", _time(completion.mean)),
        ("completion, p95", _time(completion.p95)),
        ("fairness of users", f"{one.fairness:.3f}"),
    ]


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _write(
    out: Path,
    name: str,
    log: Sequence[Allocation],
    result: Figures,
    capacity: Mapping[str, float],
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    resources = sorted({resource for one in log for resource in one.resources})
    with (out / f"{name}.allocations.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ("at_s", "what", "job_id", "task", "node_id", *resources, "queue", "user", "note")
        writer.writerow(columns)
        for one in log:
            amounts = [f"{one.resources.get(resource, 0.0):g}" for resource in resources]
            task = "" if one.task < 0 else one.task
            writer.writerow((f"{one.at_s:.6f}", one.what.value, one.job_id, task, one.node_id,
                             *amounts, one.queue, one.user, one.note))  # fmt: skip
    (out / f"{name}.figures.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    _plot(out / f"{name}.svg", log, capacity)


def _plot(path: Path, log: Sequence[Allocation], capacity: Mapping[str, float]) -> None:
    """Draw what is in use over time, where matplotlib is there (`pip install stoker[train]`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("no plots: matplotlib is not installed (pip install 'stoker[train]')", err=True)
        return
    figure = Figure(figsize=(9, 4))
    axes = figure.add_subplot()
    for name in PLOTTED:
        if capacity.get(name):
            times, used = usage_over_time(log, name)
            hours = [at_s / 3600 for at_s in times]
            axes.plot(hours, [amount / capacity[name] * 100 for amount in used], label=name)
    axes.set_xlabel("hours")
    axes.set_ylabel("in use, %")
    axes.set_ylim(0, 105)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main(prog_name="stoker simulate")
