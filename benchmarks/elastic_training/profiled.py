"""Elastic jobs whose steps take what a made-up profile says: their sizes and arrivals, live and simulated.

One profile, in the layout of ``stoker simulate --profiles``, is the truth of both: :func:`benchmarks.
elastic_training.loops.paced` sleeps its times, the simulator reckons with them. The jobs' own fits see
neither. Nothing here starts a cluster.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from stoker_goodput.batches import BatchLimits, divide
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.simulation.elastic.profiles import Model, read_profiles, tightest
from stoker_scheduler.simulation.elastic.synthetic import GPUS_PER_NODE, MadeUp, write_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NODES = 4
GPUS = NODES * GPUS_PER_NODE
JOBS = 6
SHARE = GPUS // JOBS
"""The GPUs of a job where all have the same."""
LIMITS = BatchLimits(min_batch=96, max_batch=96, min_local=6, max_local=48)
"""Of one batch that all counts divide: one GPU needs two passes for it, sixteen have 6 samples each."""
KINDS = (
    ThroughputParams(0.12, 0.018, 0.12, 0.004, 0.06, 0.004, 2.0),
    ThroughputParams(0.16, 0.024, 0.24, 0.008, 0.10, 0.008, 1.5),
    ThroughputParams(0.20, 0.032, 0.40, 0.020, 0.16, 0.012, 1.3),
)
"""The step times of small, medium and large models."""
ALONE_S = (120.0, 240.0)
"""How long the shortest and the longest job train on an equal share, where they arrive over 5 minutes."""
FULL_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job: submitted at ``arrives_s``, it makes so many steps of ``LIMITS.min_batch`` samples."""

    name: str
    arrives_s: int
    steps: int
    params: ThroughputParams


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a step on one placement: of each of its passes, and of the exchange after the last."""

    passes: int
    pass_s: float
    exchange_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.passes * self.pass_s + self.exchange_s


def planned(minutes: float, round_s: int, seed: int) -> list[PlannedJob]:
    """Return the jobs in the order of their arrival, each at a round of the scheduler, one at the first.

    A simulated job waits for a round, and a live one has one of its own: so neither waits.
    """
    random = Random(seed)
    scale = minutes / FULL_MINUTES
    times = sorted(random.uniform(0, minutes * 60) for _ in range(JOBS - 1))
    jobs = []
    for number, at_s in enumerate((0.0, *times)):
        params = KINDS[number % len(KINDS)]
        share_s = float(params.step_time(1, SHARE, -(-LIMITS.min_batch // SHARE)))
        steps = max(20, round(random.uniform(*ALONE_S) * scale / share_s))
        jobs.append(
            PlannedJob(f"job-{number}", round_s * (1 + round(at_s / round_s)), steps, params)
        )
    return jobs


def write_profiles(folder: Path, jobs: Sequence[PlannedJob], seed: int) -> None:
    """Write a model for each job, and the workload."""
    random = Random(seed)
    for job in jobs:
        model = MadeUp(job.params, LIMITS, 1, job.steps, (1.0, 1.0))
        write_model(folder / "traces" / job.name, model, random)
    with (folder / "workload.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("name", "time", "application", "num_replicas", "batch_size"))
        for job in jobs:
            writer.writerow((job.name, job.arrives_s, job.name, SHARE, LIMITS.min_batch))


def paces(model: Model) -> dict[tuple[int, ...], Pace]:
    """Return how long a step takes on each placement that a job can have."""
    found = {}
    for placement in {*model.placements, *(tightest(n, GPUS_PER_NODE) for n in range(1, GPUS + 1))}:
        batch = divide(LIMITS.min_batch, sum(placement), LIMITS)
        times = model.step_time(placement, batch.local)
        found[placement] = Pace(batch.accumulated + 1, times.accumulation_s, times.sync_s)
    return found


def read_models(folder: Path) -> Mapping[str, Model]:
    """Return the models of the jobs, by their names."""
    return read_profiles(folder)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a job pays beside its steps, in seconds: to start and end, and for each change of its GPUs."""

    start_s: float
    change_s: float


def simulated(folder: Path, policy: str, round_s: int, costs: Costs) -> dict[str, float]:
    """Return the completion time of each job by ``stoker simulate``."""
    out = folder / f"simulated-{policy}"
    command = [sys.executable, "-m", "stoker.cli", "simulate", f"--profiles={folder}"]
    command += [f"--workload={folder / 'workload.csv'}", f"--policy={policy}", f"--out={out}"]
    command += [f"--nodes={NODES}", f"--gpus-per-node={GPUS_PER_NODE}", f"--interval={round_s}"]
    command += [f"--restart-s={costs.change_s}", f"--start-s={costs.start_s}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with (out / f"workload.{policy}.jobs.csv").open(newline="") as file:
        return {
            row["job"]: float(row["finished_s"]) - float(row["submitted_s"])
            for row in csv.DictReader(file)
        }
