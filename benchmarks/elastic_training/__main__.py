"""What elasticity costs a training job: ``python -m benchmarks.elastic_training ROW [ROW ...]``.

    resizes    pauses at resizes in memory, 10M parameters over gloo, 1 <-> 2 replicas
    torchrun   the same of torchrun --nnodes 1:4, whose processes restart
    restart    a restart from a checkpoint, beside the start of a process
    kills      SIGKILL of a rank, until the next step
    overhead   statistics, ledger and commits in a step of train_gpt.py
    curve      1 -> 4 -> 2 -> 3 replicas with two SIGKILLs against an unbroken run, in float64
    live       six jobs arrive over --minutes on 16 fake GPUs: under the policy, with equal shares, simulated

The machine's load is printed before and after. Figures go to results.csv, too, unless ``--out ''``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.elastic_training import equality, live_jobs, overhead, resizing
from benchmarks.elastic_training.running import note
from benchmarks.results import HERE, append, show

PARAMETERS = 10_000_000
WANTED = {
    "resize_in_memory_pause_p50": 0.5,
    "resize_in_memory_pause_p95": 1.5,
    "restart_by_checkpoint_beyond_process_start": 5.0,
    "sigkill_to_new_step_worst": 5.0,
    "sigkill_steps_made_again_worst": 10.0,
    "gpt_step_parts_cost": 2.0,
    "curve_greatest_relative_difference": 1e-5,
    "live_jobs_mean_jct_by_static": 0.8,
    "live_jobs_mean_jct_off_simulated": 10.0,
}
"""The most that is wanted of a figure."""


def main() -> None:
    """Measure, print, and append to results.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = parser.add_argument
    rows = {
        "resizes": lambda given: resizing.in_memory(given.parameters, given.count or 16),
        "torchrun": lambda given: resizing.by_torchrun(given.parameters, given.count or 3),
        "restart": lambda given: resizing.by_checkpoint(given.parameters, given.count or 3),
        "kills": lambda given: resizing.after_a_kill(given.parameters, given.count or 4),
        "overhead": lambda given: overhead.cost(given.count or 16),
        "curve": lambda given: equality.curves(),
        "live": lambda given: live_jobs.compare(given.minutes, given.seed),
    }
    many("rows", nargs="+", choices=list(rows), metavar="ROW")
    many("--parameters", type=int, default=PARAMETERS)
    many("--count", type=int, default=0, help="of resizes, runs, restarts, kills or rounds")
    many("--minutes", type=float, default=5.0, help="in which jobs arrive; their sizes go with it")
    many("--seed", type=int, default=2, help="of the arrivals and sizes of jobs")
    many("--out", default=str(Path(HERE) / "results.csv"))
    given = parser.parse_args()
    for name in given.rows:
        note(f"{name}: load {os.getloadavg()[0]:.1f}")
        found = rows[name](given)
        show(found)
        for row in found:
            if row.case in WANTED:
                word = "reached" if row.value <= WANTED[row.case] else "missed"
                print(f"{row.case}: wanted {WANTED[row.case]:g} or less: {word}", flush=True)
        note(f"{name}: load {os.getloadavg()[0]:.1f}")
        if given.out:
            append(given.out, "stoker", "elastic_training", found)


if __name__ == "__main__":
    main()
