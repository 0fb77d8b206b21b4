"""``python -m stoker_scheduler.simulation.elastic``, or ``stoker simulate --profiles``: elastic training.

Runs the policies that share GPUs out among elastic jobs in virtual time, on jobs that go by measured
profiles, and prints their figures beside each other. The same inputs and seeds give the same output, but for
the times that policies take.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker_scheduler.core.elastic.jobs import replicas_of
from stoker_scheduler.simulation.elastic.figures import (
    Figures,
    figures,
    mean_of,
)
from stoker_scheduler.simulation.elastic.plots import can_plot, plot_loads, plot_study
from stoker_scheduler.simulation.elastic.policies import KINDS, PolicyKind, kinds
from stoker_scheduler.simulation.elastic.profiles import Model, read_profiles
from stoker_scheduler.simulation.elastic.recorded import read_events
from stoker_scheduler.simulation.elastic.study import Log, NodeType, World, run
from stoker_scheduler.simulation.elastic.workloads import WorkloadJob, read_workload
from stoker_scheduler.simulation.inputs import InputError
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--profiles", type=_FOLDER, help="Folder with traces/MODEL/*.csv.")
@click.option("--workload", "workloads", multiple=True, type=_FILE,
              help="CSV: name, time, application, num_replicas, batch_size.")  # fmt: skip
@click.option("--events", type=_FILE,
              help="Events of a cluster, whose elastic jobs are run again, instead of both.")  # fmt: skip
@click.option("--policy", "policies", multiple=True, default=("stoker",), show_default=True,
              metavar="NAME", help=f"Of {', '.join(KINDS)}, or installed; several are compared.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(1, 999), default=16, show_default=True)
@click.option("--gpus-per-node", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--gpu-type", "gpu_types", multiple=True, metavar="NAME:NODESxGPUS:SPEED",
              help="Nodes, for --nodes, whose GPUs compute SPEED times as fast as profiles say.")  # fmt: skip
@click.option("--interval", "interval_s", type=click.IntRange(1), default=60, show_default=True,
              help="Seconds between two rounds.")  # fmt: skip
@click.option("--restart-s", type=click.FloatRange(0), default=30.0, show_default=True,
              help="Seconds that a change of its allocation costs a job.")  # fmt: skip
@click.option("--restart-of", "restart_of", multiple=True, metavar="MODEL=SECONDS",
              help="The same for the jobs of a model.")  # fmt: skip
@click.option("--start-s", type=click.FloatRange(0),
              help="Seconds that the start of a job costs it, if others than a change.")  # fmt: skip
@click.option("--interference", type=click.FloatRange(0, 1, max_open=True), default=0.0,
              show_default=True, help="How much jobs that span nodes slow each other on one.")  # fmt: skip
@click.option("--noise", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Relative error of the times that jobs measure.")  # fmt: skip
@click.option("--declare-epochs", is_flag=True,
              help="Jobs say how many epochs they have, and so what is left.")  # fmt: skip
@click.option("--failures", "failures_h", type=click.FloatRange(0), default=0.0, metavar="HOURS",
              help="Mean time between failures of a node; 0: none fails.")  # fmt: skip
@click.option("--repair-s", type=click.FloatRange(1), default=600.0, show_default=True,
              help="Seconds until a node that failed is back.")  # fmt: skip
@click.option("--commit-s", type=click.FloatRange(0), default=600.0, show_default=True,
              help="Seconds between two commits of a job, to which a failure takes it back.")  # fmt: skip
@click.option("--fairness", type=click.FloatRange(-1, 1),
              help="Of stoker: the power mean of speedups that it maximises instead.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True,
              help="Runs of what is random, of which the mean is printed.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for the allocation logs, the figures as JSON, and plots.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def main(
    profiles: Path | None,
    workloads: tuple[Path, ...],
    events: Path | None,
    policies: tuple[str, ...],
    nodes: int,
    gpus_per_node: int,
    gpu_types: tuple[str, ...],
    interval_s: int,
    restart_s: float,
    restart_of: tuple[str, ...],
    start_s: float | None,
    interference: float,
    noise: float,
    declare_epochs: bool,
    failures_h: float,
    repair_s: float,
    commit_s: float,
    fairness: float | None,
    seeds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run workloads of elastic training jobs under policies of your choice, in virtual time."""
    known = kinds(fairness)
    for name in policies:
        if name not in known:
            raise click.BadParameter(
                f"{name!r} is none; {suggestion(name, known)}", param_hint="--policy"
            )
    if (events is None) == (profiles is None) or bool(workloads) != (profiles is not None):
        raise click.UsageError("give --profiles and --workload, or --events")
    try:
        models = {} if profiles is None else read_profiles(profiles)
        world = World(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            types=_types(gpu_types),
            interval_s=interval_s,
            restart_s=restart_s,
            restart_by_model=_restarts(restart_of, models),
            start_s=start_s,
            interference=interference,
            noise=noise,
            declare_epochs=declare_epochs,
            failures_h=failures_h,
            repair_s=repair_s,
            commit_s=commit_s,
        )
        jobs: dict[Path, Sequence[WorkloadJob]]
        jobs = {path: read_workload(path, models, world.gpus) for path in workloads}
        if events is not None:
            jobs[events] = _recorded(events, world)
        results = []
        for title, workload in zip(_titles(jobs), jobs.values(), strict=True):
            load = {"jobs": len(workload), "jobs_per_h": _jobs_per_h(workload)}
            for name in policies:
                found = _study(name, known[name], world, workload, seeds, out, title, quiet=as_json)
                results.append({"workload": title, "policy": name, **load, **asdict(found)})
    except InputError as error:
        raise click.ClickException(str(error)) from None
    if out is not None:
        (out / "figures.json").write_text(json.dumps({"results": results}, indent=2) + "\n")
        if can_plot():
            plot_loads(out / "jct-by-load.svg", results)
        else:
            click.echo(
                "no plots: matplotlib is not installed (pip install 'stoker[train]')", err=True
            )
        click.echo(f"allocation logs and figures are in {out}", err=True)
    if as_json:
        click.echo(json.dumps({"results": results}))
    else:
        _print(results)


def _recorded(path: Path, world: World) -> Sequence[WorkloadJob]:
    """Return the jobs of a cluster's events, and say how long they took and what is left out."""
    found = read_events(path, world.gpus)
    told = f"{len(found.jobs)} elastic jobs are run again"
    if found.completion_s:
        mean_s = sum(found.completion_s) / len(found.completion_s)
        told += f"; {len(found.completion_s)} had ended, after {mean_s:,.0f} s on average"
    if found.left_out:
        told += f"; {len(found.left_out)} had not said how fast they are, and are left out"
    click.echo(told, err=True)
    return found.jobs


def _titles(paths: Iterable[Path]) -> list[str]:
    """Return a name for each workload: that of its file, and that of its folder where two are alike."""
    paths = list(paths)
    stems = [path.stem for path in paths]
    return [
        path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}-{path.stem}"
        for path in paths
    ]


def _jobs_per_h(workload: Sequence[WorkloadJob]) -> float:
    """Return how many jobs an hour has, of as many whole hours as jobs are submitted in."""
    return len(workload) / (workload[-1].submitted_s // 3600 + 1)


def _types(texts: Sequence[str]) -> tuple[NodeType, ...]:
    """Return the types of nodes, as a100:8x4:1.0."""
    found: dict[str, NodeType] = {}
    for text in texts:
        match = re.fullmatch(r"([\w.-]+):(\d+)x(\d+):(\d*\.?\d+)", text)
        name, nodes, gpus, speed = match.groups() if match else ("", "0", "0", "0")
        if not (0 < int(nodes) <= 999 and 0 < int(gpus) <= 64 and 0 < float(speed) < 1000):
            raise InputError(
                f"--gpu-type: {text!r} must be NAME:NODESxGPUS:SPEED, as a100:8x4:1.0, with 1 to 999 nodes, "
                "1 to 64 GPUs and a speed above 0"
            )
        if name in found:
            raise InputError(f"--gpu-type: there are two of the name {name!r}")
        found[name] = NodeType(name, int(nodes), int(gpus), float(speed))
    return tuple(found.values())


def _restarts(texts: Sequence[str], models: Mapping[str, Model]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, seconds = text.partition("=")
        if name not in models:
            raise InputError(
                f"--restart-of: there is no model {name!r}\n{suggestion(name, models)}"
            )
        try:
            found[name] = float(seconds)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] < 1e9:
            raise InputError(f"--restart-of: {text!r} must be MODEL=SECONDS, as {name}=30")
    return found


def _study(
    name: str,
    kind: PolicyKind,
    world: World,
    workload: Sequence[WorkloadJob],
    seeds: int,
    out: Path | None,
    title: str,
    *,
    quiet: bool,
) -> Figures:
    """Run one policy on one workload, and again with other seeds where something is random."""
    found = []
    count = seeds if kind.is_random or world.noise or world.failures_h else 1
    with _progress(f"{title}: {name}", len(workload) * count, quiet=quiet) as advance:
        for seed in range(count):
            before = len(workload) * seed

            def finished(jobs: int, before: int = before) -> None:
                advance(before + jobs)

            log = run(world, workload, kind, seed=seed, progress=finished)
            found.append(figures(log, world, workload))
            if out is not None and seed == 0:
                _write(out, f"{title}.{name}", log)
    return mean_of(found)


@contextmanager
def _progress(title: str, jobs: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=jobs)
        yield lambda over: bar.update(task, completed=over)


def _print(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each workload, with a column for each policy."""
    from rich.console import Console
    from rich.table import Table

    for workload in dict.fromkeys(one["workload"] for one in results):
        of_policy = [one for one in results if one["workload"] == workload]
        table = Table(title=f"Elastic training jobs: {workload}")
        table.add_column("policy")
        for one in of_policy:
            table.add_column(one["policy"], justify="right")
        for title, name, form in _ROWS:
            table.add_row(title, *(form.format(one[name]) for one in of_policy))
        Console().print(table)


_ROWS = (
    ("completion (JCT), mean", "mean_jct_s", "{:,.0f} s"),
    ("completion, p50", "p50_jct_s", "{:,.0f} s"),
    ("completion, p99", "p99_jct_s", "{:,.0f} s"),
    ("makespan", "makespan_s", "{:,.0f} s"),
    ("restarts of a job", "restarts", "{:.1f}"),
    ("GPU-hours", "gpu_hours", "{:,.0f}"),
    ("GPUs in use", "utilisation", "{:.0%}"),
    ("worst finish-time fairness", "worst_fairness", "{:.1f}"),
    ("a round of the policy, p95", "policy_p95_ms", "{:.1f} ms"),
)


def _write(out: Path, name: str, log: Log) -> None:
    """Write the log, from which all figures can be computed again, and the plots."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.rounds.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("at_s", "job", "nodes", "replicas", "local_batch", "accumulated", "progress",
             "efficiency")
        )  # fmt: skip
        for row in log.rounds:
            nodes = " ".join(f"{node_id}:{count}" for node_id, count in row.allocation)
            writer.writerow((row.at_s, row.job, nodes, replicas_of(row.allocation), row.local_batch,
                             row.accumulated, f"{row.progress:.3f}", f"{row.efficiency:.4f}"))  # fmt: skip
    with (out / f"{name}.jobs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("job", "application", "submitted_s", "started_s", "finished_s", "restarts", "gpu_s")
        )
        for job in log.jobs:
            writer.writerow((job.job, job.model, job.submitted_s, f"{job.started_s:g}",
                             f"{job.finished_s:g}", job.restarts, f"{job.service_gpu_s:g}"))  # fmt: skip
    if log.failures:
        with (out / f"{name}.failures.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("node", "at_s", "until_s"))
            writer.writerows((one.node_id, one.at_s, one.until_s) for one in log.failures)
    if can_plot():
        plot_study(str(out / name), log)


if __name__ == "__main__":
    main(prog_name="stoker simulate")
