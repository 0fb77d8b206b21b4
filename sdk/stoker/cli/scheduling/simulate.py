"""``stoker simulate``: the scheduler in virtual time. The scheduler's own programs do it."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from stoker.cli.options import json_option

_REPEATED = ("--workload", "--policy")
_OF_TRACES = ("cluster", "trace", "seed", "jitter")
_OF_TRAINING = (
    "profiles", "workload", "events", "nodes", "gpus_per_node", "gpu_type", "interval", "restart_s",
    "restart_of", "start_s", "interference", "noise", "declare_epochs", "fairness", "failures", "repair_s",
    "commit_s", "seeds",
)  # fmt: skip


class _Command(click.Command):
    """Takes ``--policy a b`` for ``--policy a --policy b``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        repeated = ""
        for before, arg in zip(["", *args], args, strict=False):
            if arg.startswith("-"):
                repeated = arg if arg in _REPEATED else ""
            elif repeated and before != repeated:
                expanded.append(repeated)
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


@click.command("simulate", cls=_Command)
@click.option(
    "--cluster",
    type=click.Path(exists=True, dir_okay=False),
    help="TOML: [[nodes]] with count, resources, labels; [queues.NAME] as for `stoker queue apply`.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    help="CSV of jobs; its columns are in docs/simulate.md.",
)
@click.option("--seed", type=int, help="Of all that is random in a trace.  [default: 0]")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    help="Tasks take up to this fraction more or less than the trace says.  [default: 0]",
)
@click.option(
    "--profiles",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of measured profiles: elastic training jobs instead of a trace.",
)
@click.option(
    "--workload",
    multiple=True,
    metavar="FILE...",
    type=click.Path(exists=True, dir_okay=False),
    help="CSV of training jobs; several are run one after the other.",
)
@click.option(
    "--events",
    type=click.Path(exists=True, dir_okay=False),
    help="Events of a cluster, as `stoker list events --json` prints them: its elastic jobs, run again.",
)
@click.option("--nodes", type=click.IntRange(1), help="How many, for training jobs.  [default: 16]")
@click.option("--gpus-per-node", type=click.IntRange(1), help="Of each node.  [default: 4]")
@click.option(
    "--gpu-type",
    multiple=True,
    metavar="NAME:NODESxGPUS:SPEED",
    help="Nodes whose GPUs compute SPEED times as fast as the profiles say, as a100:8x4:1.0; they are there "
    "instead of --nodes.",
)
@click.option("--interval", type=click.IntRange(1), help="Seconds of a round.  [default: 60]")
@click.option(
    "--restart-s",
    type=click.FloatRange(0),
    help="Seconds that a change of its allocation costs a training job.  [default: 30]",
)
@click.option(
    "--restart-of", multiple=True, metavar="MODEL=SECONDS", help="The same for jobs of a model."
)
@click.option(
    "--start-s",
    type=click.FloatRange(0),
    help="Seconds that the start of a training job costs it.  [default: as a change]",
)
@click.option(
    "--interference",
    type=click.FloatRange(0, 1, max_open=True),
    help="How much training jobs that span nodes slow each other on one.  [default: 0]",
)
@click.option(
    "--noise",
    type=click.FloatRange(0, 1),
    help="Relative error of the times that training jobs measure.  [default: 0]",
)
@click.option(
    "--declare-epochs",
    is_flag=True,
    help="Training jobs say how many epochs they have, and so what is left.",
)
@click.option(
    "--failures",
    type=click.FloatRange(0),
    metavar="HOURS",
    help="Mean time between failures of a node, for training jobs.  [default: 0, none fails]",
)
@click.option(
    "--repair-s",
    type=click.FloatRange(1),
    help="Seconds until a node that failed is back.  [default: 600]",
)
@click.option(
    "--commit-s",
    type=click.FloatRange(0),
    help="Seconds between two commits of a training job, to which a failure takes it back.  [default: 600]",
)
@click.option(
    "--fairness",
    type=click.FloatRange(-1, 1),
    help="Of the policy stoker: maximise the power mean of speedups over a fair share, from 1 (their sum) to "
    "-1 (the worst off), instead of what shortens completion times.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help="Runs of what is random, of which the mean is printed.  [default: 5]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME...",
    help="Of a trace, the policy of queues that name none (priority); of training jobs, who shares out "
    "the GPUs (stoker). Several are compared.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Folder for the allocation log, the figures as JSON, and plots.",
)
@json_option
def simulate(policies: tuple[str, ...], out: str | None, as_json: bool, **options: Any) -> None:
    """Run a trace of jobs (--cluster, --trace), or elastic ones (--profiles, --workload; --events).

    With the real scheduler, in virtual time.
    """
    recorded = options["events"] is not None
    training = recorded or options["profiles"] is not None or bool(options["workload"])
    wanted = ("profiles", "workload") if training else ("cluster", "trace")
    ours, others = (_OF_TRAINING, _OF_TRACES) if training else (_OF_TRACES, _OF_TRAINING)
    for name in () if recorded else wanted:
        if not options[name]:
            raise click.UsageError(
                f"give --{wanted[0]} and --{wanted[1]}; --{name} is missing\n"
                "a trace of jobs has --cluster and --trace, elastic training --profiles and --workload"
            )
    for name in others:
        if options[name] not in (None, (), False):
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with --{wanted[0]}")
    module = "stoker_scheduler.simulation.elastic" if training else "stoker_scheduler.simulation"
    program = [sys.executable, "-m", module]
    for name in ours:
        given = options[name]
        for value in given if isinstance(given, tuple) else (given,):
            program += _option(name, value)
    program += [f"--policy={name}" for name in policies]
    program += [f"--out={out}"] if out is not None else []
    program += ["--json"] if as_json else []
    sys.stdout.flush()
    os.execv(sys.executable, program)


def _option(name: str, value: Any) -> list[str]:
    """Return an option as a program takes it: a flag without value, nothing for what was not given."""
    if value is None or value is False:
        return []
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")]
