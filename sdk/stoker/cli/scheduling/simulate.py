"""``stoker simulate``: the scheduler on a trace, in virtual time. The scheduler's own program does it."""

from __future__ import annotations

import os
import sys

import click

from stoker.cli.options import json_option


@click.command("simulate")
@click.option(
    "--cluster",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="TOML: [[nodes]] with count, resources, labels; [queues.NAME] as for `stoker queue apply`.",
)
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="CSV of jobs; its columns are in docs/simulate.md.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("priority",),
    show_default=True,
    metavar="NAME",
    help="The policy of queues that name none; repeat it to compare several.",
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
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Folder for the allocation log, the figures as JSON, and plots.",
)
@json_option
def simulate(
    cluster: str,
    trace: str,
    policies: tuple[str, ...],
    seed: int,
    jitter: float,
    out: str | None,
    as_json: bool,
) -> None:
    """Run a trace of jobs on a cluster of your choice, with the real scheduler in virtual time."""
    program = [sys.executable, "-m", "stoker_scheduler.simulate", f"--cluster={cluster}"]
    program += [f"--trace={trace}", f"--seed={seed}", f"--jitter={jitter}"]
    program += [f"--policy={name}" for name in policies]
    program += [f"--out={out}"] if out is not None else []
    program += ["--json"] if as_json else []
    sys.stdout.flush()
    os.execv(sys.executable, program)
