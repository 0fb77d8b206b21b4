"""``python -m stoker_scheduler.simulation.elastic.synthetic DIR``: profiles and a workload for trials.

Made up, of no real model: step times by the formulas of :mod:`stoker_goodput.throughput`, with an error that
depends on the placement as on real machines, and a noise of the gradient that grows over the epochs.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

import numpy as np

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.simulation.elastic.profiles import smallest_rotation

GPUS_PER_NODE = 4
ERROR = 0.03


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A made-up model: work in steps of the smallest batch, noise scales of its first and last epoch."""

    params: ThroughputParams
    limits: BatchLimits
    epochs: int
    work: float
    noise_scales: tuple[float, float]


MODELS = {
    "small": MadeUp(
        ThroughputParams(0.02, 0.0005, 0.05, 0.001, 0.01, 0.0005, 2.0),
        BatchLimits(64, 2048, 16, 256), 10, 12_000, (300.0, 4_000.0),
    ),
    "medium": MadeUp(
        ThroughputParams(0.05, 0.004, 0.12, 0.003, 0.03, 0.002, 1.5),
        BatchLimits(32, 1024, 8, 64), 8, 40_000, (100.0, 2_000.0),
    ),
    "large": MadeUp(
        ThroughputParams(0.08, 0.008, 0.35, 0.01, 0.05, 0.004, 1.3),
        BatchLimits(32, 2048, 8, 32), 12, 150_000, (200.0, 5_000.0),
    ),
}  # fmt: skip


def write(folder: Path, *, jobs: int = 40, hours: float = 2.0, seed: int = 0) -> None:
    """Write ``traces/`` and ``workload.csv`` into a folder: mostly small jobs, by random times."""
    random = Random(seed)
    for name, model in MODELS.items():
        write_model(folder / "traces" / name, model, random)
    times = sorted(random.randrange(int(hours * 3600)) for _ in range(jobs))
    rows = []
    for number, at_s in enumerate(times):
        name = random.choices(list(MODELS), weights=(0.7, 0.2, 0.1))[0]
        limits = MODELS[name].limits
        replicas = random.choice((1, 2, 4, 8))
        batch = min(limits.max_batch, limits.max_local * replicas)
        rows.append((f"{name}-{number}", at_s, name, replicas, max(batch, limits.min_batch)))
    header = ("name", "time", "application", "num_replicas", "batch_size")
    _write_csv(folder / "workload.csv", header, rows)


def write_model(folder: Path, model: MadeUp, random: Random) -> None:
    """Write the profile of a model into its folder ``traces/NAME``: placements on up to four nodes."""
    limits = model.limits
    local = np.unique(np.geomspace(limits.min_local, limits.max_local, 5).astype(int)).tolist()
    counts = range(1, GPUS_PER_NODE + 1)
    placements = {
        smallest_rotation(placement)
        for nodes in range(1, 5)
        for placement in product(counts, repeat=nodes)
    }
    rows: list[tuple[object, ...]] = []
    for placement in sorted(placements):
        factor = 1 + random.uniform(-ERROR, ERROR)
        name = "".join(map(str, placement))
        for batch in local:
            times = _times(model, len(placement), sum(placement), batch, factor)
            rows.append((name, batch, *times))
    _write_csv(
        folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"), rows
    )
    rows = [
        (nodes, nodes * each, batch, *_times(model, nodes, nodes * each, batch, 1.0))
        for nodes in (6, 8, 12, 16)
        for each in counts
        for batch in local
    ]
    header = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    _write_csv(folder / "scalability.csv", header, rows)
    total = limits.min_batch
    while total <= limits.max_batch:
        _write_csv(
            folder / f"validation-{total}.csv",
            ("progress", "iteration", "metric", "grad_sqr", "grad_var"),
            _epochs(model, total),
        )
        total *= 2


def _times(
    model: MadeUp, nodes: int, replicas: int, batch: int, factor: float
) -> tuple[float, float]:
    step = float(model.params.step_time(nodes, replicas, batch)) * factor
    return step, step - float(model.params.accumulation_time(batch)) * min(factor, 1.0)


def _epochs(model: MadeUp, total: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    steps = 0.0
    scale = total / model.limits.min_batch
    for epoch, phi in enumerate(np.geomspace(*model.noise_scales, model.epochs), 1):
        noise = GradientNoise(sqr=1.0, var=float(phi) / model.limits.min_batch)
        steps += model.work / model.epochs / float(noise.gain(scale))
        progress = model.work * epoch / model.epochs
        rows.append((progress, int(steps), 0.0, noise.sqr, noise.var))
    return rows


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stoker_scheduler.simulation.elastic.synthetic DIR")
    write(Path(sys.argv[1]))
