"""Six live elastic jobs on sixteen fake GPUs: under the policy, with equal shares, and simulated.

Everything is live but the time of a step, which is slept: processes, process groups, resizes, the
scheduler's rounds, and the jobs' own measurements, by which the policy goes. A job of all GPUs goes first, so
that every node has imported what replicas need. Completion times (JCT) are the gcs's: from submission to the
end of the job's processes. ``stoker simulate`` is given the same profiles and arrivals, and what the live
jobs' starts and changes were measured to cost. A start is all from the submission to the first step, so it
has the wait for GPUs that others leave, too: simulated jobs leave theirs in no time.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.elastic_training import loops, profiled
from benchmarks.elastic_training.running import WAIT_S, checked, cluster, note
from benchmarks.results import Row
from stoker.jobs import JobSubmissionClient
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from stoker_scheduler.simulation.elastic.profiles import tightest
from stoker_scheduler.simulation.elastic.synthetic import GPUS_PER_NODE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import stoker

ROUND_S = 5
"""Seconds between two rounds of the scheduler, live and simulated."""
LOOK_S = 1.0
WARM_STEPS = 5
MOST_S = 1800.0
"""Jobs that have not ended after so long, beside the time of their arrivals, do not end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a live job, in seconds: ``train_s`` is in steps of its generations, ``pause_s`` between.

    ``paced_s`` is what the same steps take by the profile, ``change_s`` the median pause of a survivor.
    """

    name: str
    jct_s: float
    start_s: float
    train_s: float
    paced_s: float
    pause_s: float
    end_s: float
    changes: tuple[str, ...]
    """The kinds of its changes, and the replicas before and after each."""
    change_s: float


def compare(minutes: float, seed: int) -> list[Row]:
    """Run the jobs under the policy and with equal shares, simulate both, and print them beside each other.

    SystemExit where a ledger is not exact.
    """
    jobs = profiled.planned(minutes, ROUND_S, seed)
    with tempfile.TemporaryDirectory(prefix="stoker-live-jobs-") as name:
        folder = Path(name)
        profiled.write_profiles(folder, jobs, seed)
        live = run(jobs, folder, "policy")
        print(f"\npolicy, seconds\n{table(parts_of(live))}", flush=True)
        static = run(jobs, folder, "static")
        print(f"\nequal shares, seconds\n{table(parts_of(static))}", flush=True)
        costs = costs_of(live)
        note(f"simulated with {costs.start_s:.1f} s a start and {costs.change_s:.2f} s a change")
        reckoned = profiled.simulated(folder, "stoker", ROUND_S, costs)
        shared = profiled.simulated(folder, "fifo", ROUND_S, costs_of(static))
    print(f"\ncompletion times, seconds\n{table(beside(live, static, reckoned, shared))}\n")
    return figures(live, static, reckoned, shared, costs)


def run(jobs: Sequence[profiled.PlannedJob], folder: Path, kind: str) -> list[Outcome]:
    """Run the jobs on a cluster of their own, under the ``"policy"`` or ``"static"``: with equal shares."""
    models = profiled.read_models(folder)
    paces = {job.name: profiled.paces(models[job.name]) for job in jobs}
    place = folder / kind
    place.mkdir()
    with cluster(4, profiled.NODES, gpus=GPUS_PER_NODE, interval_s=ROUND_S) as info:
        client = JobSubmissionClient(info.address, info.token)
        _warm(place, paces[jobs[0].name])
        note(f"{kind}: {len(jobs)} jobs come in {jobs[-1].arrives_s} s")
        trainers = _submit_all(jobs, paces, place, client, kind)
        found = []
        for job in jobs:
            result = checked(trainers[job.name].result(WAIT_S))
            _verify(trainers[job.name].job_id, info)
            record = client.get_job(trainers[job.name].job_id)
            lines = loops.lines(place / job.name / "steps")
            found.append(outcome_of(job.name, record, result, lines, paces[job.name]))
        return found


def _warm(folder: Path, paces: Mapping[tuple[int, ...], profiled.Pace]) -> None:
    """Have a replica on every GPU once."""
    fixed = Scaling(
        profiled.GPUS, profiled.GPUS, base_batch=profiled.LIMITS.min_batch, adapt="none"
    )
    checked(_trainer("warm", folder, WARM_STEPS, paces, fixed).fit(WAIT_S))


def _trainer(
    name: str,
    folder: Path,
    steps: int,
    paces: Mapping[tuple[int, ...], profiled.Pace],
    scaling: Scaling,
) -> ElasticTrainer:
    (folder / name / "steps").mkdir(parents=True)
    return ElasticTrainer(
        loops.paced,
        name=name,
        config={
            "folder": str(folder / name / "steps"),
            "steps": steps,
            "batch": profiled.LIMITS.min_batch,
            "paces": dict(paces),
        },
        scaling=scaling,
        checkpoint=Checkpoint(str(folder / name / "checkpoints"), every=1_000_000, commit_every=50),
        failure=Failure(hang_s=60.0),
    )


def _scaling(kind: str) -> Scaling:
    limits = profiled.LIMITS
    least, most = (1, profiled.GPUS) if kind == "policy" else (profiled.SHARE, profiled.SHARE)
    return Scaling(
        min_replicas=least,
        max_replicas=most,
        base_batch=limits.min_batch,
        local_batch=(limits.min_local, limits.max_local),
        adapt="replicas" if kind == "policy" else "none",
    )


def _submit_all(
    jobs: Sequence[profiled.PlannedJob],
    paces: Mapping[str, Mapping[tuple[int, ...], profiled.Pace]],
    folder: Path,
    client: JobSubmissionClient,
    kind: str,
) -> dict[str, ElasticTrainer]:
    """Submit each job when it is to come, and return when all have ended."""
    trainers: dict[str, ElasticTrainer] = {}
    began_s, said = time.monotonic(), ""
    while True:
        at_s = time.monotonic() - began_s
        if at_s > jobs[-1].arrives_s + MOST_S:
            raise TimeoutError(f"the jobs have not ended after {at_s:.0f} s: {said}")
        for job in jobs:
            if job.name not in trainers and at_s >= job.arrives_s:
                one = _trainer(job.name, folder, job.steps, paces[job.name], _scaling(kind))
                one.submit()
                trainers[job.name] = one
        there = {one.job_id: one for one in client.list_jobs()}
        records = [there[one.job_id] for one in trainers.values()]
        now = " ".join(f"{_replicas(one):2}" for one in records)
        if now != said:
            said = now
            note(f"{at_s:5.0f} s  GPUs {now}")
        if len(trainers) == len(jobs) and all(one.state.terminal for one in records):
            return trainers
        time.sleep(LOOK_S)


def _replicas(job: Any) -> str:
    if job.state.terminal:
        return "."
    return str(len(job.elastic.replicas)) if job.elastic is not None else "0"


def _verify(job_id: str, info: stoker.ClusterInfo) -> None:
    """End with what is wrong unless the job's ledger is exact."""
    command = [sys.executable, "-m", "stoker.cli", "train", "verify", job_id]
    command += [f"--address={info.address}", f"--token={info.token}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(f"{job_id}: {said.stdout}{said.stderr}")


def outcome_of(
    name: str,
    record: Any,
    result: Any,
    lines: Sequence[loops.Line],
    paces: Mapping[tuple[int, ...], profiled.Pace],
) -> Outcome:
    """Return what became of a job, by its record in the gcs and the lines that its rank 0 wrote."""
    train_s = paced_s = 0.0
    for before, after in itertools.pairwise(lines):
        if before.generation == after.generation:
            train_s += after.at_s - before.at_s
            paced_s += paces[tightest(after.world, GPUS_PER_NODE)].step_s
    pauses = [one.pause_s for one in result.resizes]
    whole_s = lines[-1].at_s - lines[0].at_s
    first_s = paces[tightest(lines[0].world, GPUS_PER_NODE)].step_s
    return Outcome(
        name=name,
        jct_s=record.ended_at_s - record.created_at_s,
        start_s=lines[0].at_s - first_s - record.created_at_s,
        train_s=train_s,
        paced_s=paced_s,
        pause_s=whole_s - train_s,
        end_s=record.ended_at_s - lines[-1].at_s,
        changes=tuple(f"{one.kind} {one.before}-{one.after}" for one in result.resizes),
        change_s=statistics.median(pauses) if pauses else 0.0,
    )


def costs_of(outcomes: Sequence[Outcome]) -> profiled.Costs:
    """Return what starts (with the ends of processes) cost in the mean, and changes in the median."""
    return profiled.Costs(
        start_s=statistics.fmean(one.start_s + one.end_s for one in outcomes),
        change_s=statistics.median([one.change_s for one in outcomes if one.changes] or [0.0]),
    )


def parts_of(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Return rows that say where the time of jobs went."""
    return [
        {
            "job": one.name,
            "JCT": f"{one.jct_s:.1f}",
            "start": f"{one.start_s:.1f}",
            "steps": f"{one.train_s:.1f}",
            "by profile": f"{one.paced_s:.1f}",
            "between generations": f"{one.pause_s:.1f}",
            "end": f"{one.end_s:.1f}",
            "median pause": f"{one.change_s:.2f}" if one.changes else "-",
            "changes": ", ".join(one.changes) or "-",
        }
        for one in outcomes
    ]


def beside(
    live: Sequence[Outcome],
    static: Sequence[Outcome],
    reckoned: Mapping[str, float],
    shared: Mapping[str, float],
) -> list[dict[str, str]]:
    """Return a row for each job, and one of means."""
    columns = {
        "policy": {one.name: one.jct_s for one in live},
        "simulated": dict(reckoned),
        "static": {one.name: one.jct_s for one in static},
        "static, simulated": dict(shared),
    }
    rows = [
        {"job": one.name, **{title: f"{times[one.name]:.1f}" for title, times in columns.items()}}
        for one in live
    ]
    means = {title: f"{statistics.fmean(times.values()):.1f}" for title, times in columns.items()}
    return [*rows, {"job": "mean", **means}]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as aligned text, under their keys."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def figures(
    live: Sequence[Outcome],
    static: Sequence[Outcome],
    reckoned: Mapping[str, float],
    shared: Mapping[str, float],
    costs: profiled.Costs,
) -> list[Row]:
    """Return the means, and the two ratios that are wanted."""
    live_s = statistics.fmean(one.jct_s for one in live)
    static_s = statistics.fmean(one.jct_s for one in static)
    reckoned_s, shared_s = (statistics.fmean(one.values()) for one in (reckoned, shared))
    return [
        Row("live_jobs_policy_mean_jct", live_s, "s"),
        Row("live_jobs_static_mean_jct", static_s, "s"),
        Row("live_jobs_simulated_mean_jct", reckoned_s, "s"),
        Row("live_jobs_static_simulated_mean_jct", shared_s, "s"),
        Row("live_jobs_start_and_end_mean", costs.start_s, "s"),
        Row("live_jobs_change_median", costs.change_s, "s"),
        Row("live_jobs_mean_jct_by_static", live_s / static_s, ""),
        Row("live_jobs_mean_jct_off_simulated", 100 * abs(live_s / reckoned_s - 1), "%"),
    ]
