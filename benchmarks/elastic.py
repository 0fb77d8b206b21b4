"""The policy of elastic jobs beside Pollux's published times: ``python -m benchmarks.elastic --data DIR``.

``DIR`` has the data of Pollux's simulator study (profiles, workloads, published completion times), which are
not part of the repository. Without it, only the time of rounds is measured: of ``allocate`` with all that
jobs measure new, but without their fits. With ``--sensitivity`` every constant is halved and doubled.
OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1, which ``make bench-elastic`` sets, leave the cores to the studies.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.goodput_policy import Constants, GoodputPolicy
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints, Snapshot, replicas_of
from stoker_scheduler.simulation.elastic.figures import fairness, figures
from stoker_scheduler.simulation.elastic.policies import KINDS, PolicyKind
from stoker_scheduler.simulation.elastic.profiles import read_profiles
from stoker_scheduler.simulation.elastic.study import JobRow, World, run
from stoker_scheduler.simulation.elastic.workloads import read_workload

LOADS = ("1.0", "0.5", "1.5", "2.0")
WORKLOADS = (1, 2, 3, 4)
SIZES = ((64, 60, 0.050), (1024, 500, 1.0), (2048, 1000, 3.0))
"""GPUs, jobs, and the seconds in which nearly every round is to be over."""
RESTARTS = {"cifar10": 50.0, "deepspeech2": 25.0, "bert": 120.0, "yolov3": 80.0, "imagenet": 250.0,
            "ncf": 15.0}  # fmt: skip
"""Seconds that a restart took in the study of Sia."""
Study = tuple[Path, str, int, str, Constants, World, int]


class Result(NamedTuple):
    """One study: mean, p99 and makespan by those published for Pollux; what it took, and means in seconds.

    ``fairness`` is the worst finish-time-fairness ratio, ``published_fairness`` that of Pollux.
    """

    mean: float
    p99: float
    makespan: float
    took_s: float
    mean_jct_s: float
    fairness: float
    published_fairness: float


def study(arguments: Study) -> Result:
    """Run one policy on one workload of the data."""
    data, load, number, policy, constants, world, seed = arguments
    folder = "workloads" if load == "1.0" else f"workloads-{load}"
    jobs = read_workload(data / folder / f"workload-{number}.csv", read_profiles(data), world.gpus)
    kind = KINDS[policy]
    if policy == "stoker":
        kind = PolicyKind(lambda _: GoodputPolicy(constants))
    began_s = time.perf_counter()
    found = figures(run(world, jobs, kind, seed=seed), world, jobs)
    took_s = time.perf_counter() - began_s
    with (data / f"published/jcts-{load}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == str(number)]
    published = [float(row["pollux_s"]) for row in rows]
    submitted = {job.name: job.submitted_s for job in jobs}
    makespan_s = max(float(row["pollux_s"]) + submitted[row["name"]] for row in rows)
    theirs = [
        JobRow(name, "", at_s, at_s, at_s + float(row["pollux_s"]), 0, 0.0)
        for row in rows
        for name, at_s in ((row["name"], submitted[row["name"]]),)
    ]
    return Result(
        mean=found.mean_jct_s / statistics.fmean(published),
        p99=found.p99_jct_s / float(np.percentile(published, 99)),
        makespan=found.makespan_s / makespan_s,
        took_s=took_s,
        mean_jct_s=found.mean_jct_s,
        fairness=found.worst_fairness,
        published_fairness=max(fairness(theirs, world, jobs).values()),
    )


def by_load(
    data: Path, policy: str, constants: Constants, world: World, loads: tuple[str, ...] = LOADS
) -> dict[str, list[Result]]:
    """Return the results of the four workloads of each load."""
    seeds = range(3 if KINDS[policy].is_random or world.noise else 1)
    work = [
        (data, load, number, policy, constants, world, seed)
        for load in loads
        for number in WORKLOADS
        for seed in seeds
    ]
    with multiprocessing.get_context("fork").Pool() as pool:
        found = pool.map(study, work, chunksize=1)
    results = {}
    for index, load in enumerate(loads):
        ours = found[index * 4 * len(seeds) : (index + 1) * 4 * len(seeds)]
        grouped = np.array(ours).reshape(4, len(seeds), -1).mean(axis=1)
        results[load] = [Result(*map(float, row)) for row in grouped]
    return results


def show(title: str, results: dict[str, list[Result]]) -> None:
    """Print a line for each load, and one of its workloads."""
    for load, rows in results.items():
        mean = Result(*(statistics.fmean(column) for column in zip(*rows, strict=True)))
        print(
            f"{title:24s} load {load}: {mean.mean:.3f} of Pollux's mean, p99 {mean.p99:.3f}, "
            f"makespan {mean.makespan:.3f}, {mean.took_s:.0f} s a workload"
        )
        each = ", ".join(
            f"{row.mean_jct_s:.0f} s ({row.mean:.3f}, fairness {row.fairness:.1f}, "
            f"Pollux's {row.published_fairness:.1f})"
            for row in rows
        )
        print(f"{'':24s} {each}", flush=True)


def rounds(gpus: int, jobs: int, count: int = 20, seed: int = 0) -> list[float]:
    """Return the seconds of some rounds in which every job has measured something new."""
    random = Random(seed)
    nodes = {
        f"node-{index}": 8 if gpus > 64 else 4 for index in range(gpus // (8 if gpus > 64 else 4))
    }
    limits = BatchLimits(64, 16_384, 8, 256)
    standing = [
        ElasticJob(
            f"job_{index}", random.uniform(0, 3600), service_gpu_s=10 ** random.uniform(0, 6)
        )
        for index in range(jobs)
    ]
    params = [
        ThroughputParams(0.05, 0.004, random.uniform(0.02, 0.5), 0.001, 0.01, 0.0005, 2.0)
        for _ in standing
    ]
    policy, found = GoodputPolicy(), []
    for number in range(count):
        hints = {
            job.job_id: Hints(limits, one, GradientNoise(1.0, 10 ** random.uniform(0, 3)), 64)
            for job, one in zip(standing, params, strict=True)
        }
        snapshot = Snapshot(nodes, tuple(standing))
        began_s = time.perf_counter()
        answer = policy.allocate(snapshot, hints, 3600.0 + 60 * number)
        found.append(time.perf_counter() - began_s)
        standing = [
            replace(
                job,
                allocation=answer.get(job.job_id, ()),
                service_gpu_s=job.service_gpu_s + 60 * replicas_of(answer.get(job.job_id, ())),
            )
            for job in standing
        ]
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the data of Pollux's study")
    parser.add_argument("--policy", action="append", choices=list(KINDS), help="[stoker]")
    parser.add_argument(
        "--declared", action="store_true", help="also with epochs that are declared"
    )
    parser.add_argument("--sensitivity", action="store_true", help="half and double each constant")
    options = parser.parse_args()
    for gpus, jobs, limit_s in SIZES:
        p50, p95, p99 = np.percentile(rounds(gpus, jobs), (50, 95, 99))
        print(
            f"a round of {jobs} jobs on {gpus} GPUs: p50 {p50 * 1000:.0f} ms, p95 {p95 * 1000:.0f}, "
            f"p99 {p99 * 1000:.0f} (limit {limit_s * 1000:.0f})",
            flush=True,
        )
    if options.data is None:
        print("no comparison with Pollux: give --data")
        return
    world, constants = World(), Constants()
    for policy in options.policy or ["stoker"]:
        show(policy, by_load(options.data, policy, constants, world))
        disturbed = replace(world, noise=0.05, restart_by_model=RESTARTS)
        if options.declared:
            declared = replace(world, declare_epochs=True)
            show(f"{policy}, declared", by_load(options.data, policy, constants, declared))
        title = f"{policy}, noise and restarts"
        show(title, by_load(options.data, policy, constants, disturbed, ("1.0",)))
    base = by_load(options.data, "stoker", constants, world) if options.sensitivity else {}
    mean = statistics.fmean(row.mean for rows in base.values() for row in rows) if base else 0.0
    for name, value in asdict(constants).items() if base else ():
        for factor in (0.5, 2.0):
            changed = type(value)(value * factor)
            if name == "unseen_network":
                changed = min(changed, 1.0)
            if name == "power":
                changed = min(changed, 0.99)
            results = by_load(options.data, "stoker", replace(constants, **{name: changed}), world)
            other = statistics.fmean(row.mean for rows in results.values() for row in rows)
            print(f"{name:16s} {value:g} -> {changed:g}: {other / mean - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
